"""The API reference lists every public name."""

from __future__ import annotations

import re
from pathlib import Path

import jaxckpt


def test_the_reference_documents_every_public_name() -> None:
    pages = (Path(__file__).parents[2] / "docs" / "api").glob("*.md")
    documented = {name for page in pages for name in re.findall(r"^::: jaxckpt\.(\w+)$", page.read_text(), re.M)}
    assert set(jaxckpt.__all__) - documented == set()
