"""The code blocks of the docs, for tests that run what `docs/run_blocks.py` cannot."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, heading: str | None = None, language: str = "python") -> list[str]:
    """The blocks of this language on a page, or below one of its second-level headings."""
    section = (DOCS / page).read_text()
    if heading is not None:
        _, found, section = section.partition(f"\n## {heading}\n")
        assert found, f"{page} has no section {heading}"
        section = section.partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
