"""The code blocks of the docs, for tests that run what `docs/run_blocks.py` cannot."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, heading: str, language: str = "python") -> list[str]:
    """The blocks of this language below a second-level heading of a page."""
    _, found, section = (DOCS / page).read_text().partition(f"\n## {heading}\n")
    assert found, f"{page} has no section {heading}"
    return re.findall(rf"^```{language}\n(.*?)^```$", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
