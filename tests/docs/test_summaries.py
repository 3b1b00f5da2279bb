"""The summary of the API and docs/llms.txt are complete."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import jaxckpt

DOCS = Path(__file__).parents[2] / "docs"
LLMS = (DOCS / "llms.txt").read_text()


@pytest.mark.child
def test_the_summary_of_the_api_has_every_public_name() -> None:
    if importlib.util.find_spec("griffe") is None:
        pytest.skip("griffe is not installed")
    command = [sys.executable, str(DOCS / "api_summary.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    defined = set(re.findall(r"^(?:class|def|async def) (\w+)", done.stdout, re.MULTILINE))
    assert {name for name in jaxckpt.__all__ if inspect.isclass(getattr(jaxckpt, name))} <= defined
    assert {name for name in jaxckpt.__all__ if inspect.isroutine(getattr(jaxckpt, name))} <= defined


def pages(nav: Any) -> set[str]:
    """All pages in a part of the navigation of mkdocs.yml."""
    if isinstance(nav, str):
        return {nav}
    return set[str]().union(*map(pages, nav.values() if isinstance(nav, dict) else nav))


def test_llms_txt_lists_every_page_of_the_site() -> None:
    navigation = pages(yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())["nav"])
    not_listed = {"index.md", *(f"api/{name}.md" for name in PARTS_OF_THE_REFERENCE)}
    links = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S", LLMS, re.MULTILINE)
    assert len(links) == len(set(links))
    assert set(links) == (navigation | {"api/summary.md"}) - not_listed


PARTS_OF_THE_REFERENCE = ("save-and-restore", "look", "checkpointer", "convert", "options", "errors")
"""Pages that mkdocstrings fills: their Markdown is a list of names."""


def test_llms_txt_has_the_form_of_its_convention() -> None:
    """https://llmstxt.org: a heading, a quote, text without headings, then sections that are lists of links."""
    head, *sections = re.split(r"^## .+\n\n", LLMS, flags=re.MULTILINE)
    assert re.match(r"# jaxckpt\n\n> .+\n\n(- .+\n)+\n$", head)
    assert all(re.fullmatch(r"(- \[[^]]+\]\([^)]+\): .+\n)+\n?", section) for section in sections)
    assert "\n## Optional\n" in LLMS


def test_llms_txt_names_the_current_requirements() -> None:
    pyproject = (DOCS.parent / "pyproject.toml").read_text()
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', pyproject)
    (jax,) = re.findall(r'"jax>=([\d.]+)"', pyproject)
    assert f"Requires Python {python} and JAX {jax}, or newer." in LLMS
