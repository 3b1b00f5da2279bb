"""The first pages agree, every page says what it is for, and the docs stay short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MOST_WORDS = 35_000


def first_example(path: str) -> str:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / path).read_text(), re.MULTILINE | re.DOTALL)[0]


@pytest.mark.parametrize("path", ["docs/index.md", "docs/quickstart.md"])
def test_there_is_one_first_example(path: str) -> None:
    assert first_example(path) == first_example("README.md")


def test_the_bullets_of_the_readme_are_short_and_those_of_the_home_page() -> None:
    readme, home = (
        re.findall(r"^- \*\*.*$", (ROOT / path).read_text(), re.MULTILINE) for path in ("README.md", "docs/index.md")
    )
    assert readme == home
    assert len(readme) == 4
    assert max(len(bullet.split()) for bullet in readme) - 1 <= 16


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT / "docs")))
def test_a_page_begins_with_what_its_reader_can_do_after_it(path: Path) -> None:
    if path.parent.name == "docs" and path.name != "index.md":  # the others are the home page and the reference
        beginning = path.read_text().split("\n\n")[1]
        assert beginning.startswith("After this page"), beginning


def test_the_docs_are_short() -> None:
    assert sum(len(path.read_text().split()) for path in PAGES) <= MOST_WORDS


@pytest.mark.parametrize("path", ["README.md", "docs/index.md"])
def test_the_count_of_faults_is_that_of_the_table(path: str) -> None:
    (total,) = re.findall(r"\| \*\*all\*\* \|  \| \*\*([\d,]+)\*\*", (ROOT / "docs/reliability.md").read_text())
    assert f"In [{total} fault injections]" in (ROOT / path).read_text()
