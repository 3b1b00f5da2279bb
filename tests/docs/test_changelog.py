"""CHANGELOG.md has the form of Keep a Changelog, with a section for the format, and names the current version."""

from __future__ import annotations

import re
from pathlib import Path

import jaxckpt

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = ["Format", "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_each_release_has_a_date_and_known_sections() -> None:
    releases = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    for release in releases:
        assert re.match(r"\[(Unreleased|[\d.]+\] - (unreleased|\d{4}-\d\d-\d\d))", release)
        sections = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert sections[0] == "Format"
        assert sections == [name for name in SECTIONS if name in sections]


def test_the_newest_release_is_this_version() -> None:
    newest = re.findall(r"^## \[([\d.]+)\]", TEXT, re.MULTILINE)[0]
    assert newest == jaxckpt.__version__


def test_links_to_files_and_headings_exist() -> None:
    for path, heading in re.findall(r"\]\(((?!https:)[^)#]+)#?([^)]*)\)", TEXT):
        assert (ROOT / path).is_file(), path
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings]
        assert not heading or heading in anchors, (path, heading)
