"""Code on a page fits its column on the site: a reader never scrolls sideways."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COLUMNS = 84  # what the site shows in a window of 1280 px

_BLOCK = re.compile(r"^ *(?P<fence>`{3,}|~{3,})[^`\n]*\n(?P<code>.*?)^ *(?P=fence)$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?:    (?! *[-|] ).*\n)+")  # a block without fences; not a nested list or table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_fits_its_column(page: Path) -> None:
    text = page.read_text()
    blocks = [(match.start("code"), match["code"], 0) for match in _BLOCK.finditer(text)]
    blocks += [(match.start(), match[0], 4) for match in _INDENTED.finditer(_BLOCK.sub(_blank, text))]
    too_wide = {
        text.count("\n", 0, start) + 1 + number: line
        for start, code, indent in blocks
        for number, line in enumerate(code.splitlines())
        if len(line) > COLUMNS + indent
    }
    assert not too_wide, "\n".join(f"{page.name}:{number}: {line}" for number, line in sorted(too_wide.items()))


def _blank(match: re.Match[str]) -> str:
    """As many characters and lines, but no code."""
    return re.sub(".", ".", match[0])
