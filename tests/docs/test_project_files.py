"""The files for contributors agree with the package, and list what the owner must still fill in."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import jaxckpt

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PUBLISHED = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "pyproject.toml")]


def workflow(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def test_the_map_of_rooms_follows_the_import_order() -> None:
    source = (ROOT / "tests/test_import_order.py").read_text()
    layers, without_jax = (
        re.findall(r'"(\w+)"', re.search(rf"^{name} = [\[(](.*?)[\])]$", source, re.DOTALL | re.MULTILINE)[1])  # type: ignore[index]
        for name in ("LAYERS", "WITHOUT_JAX")
    )
    folders = {path.name for path in (ROOT / "jaxckpt").iterdir() if (path / "__init__.py").exists()}
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\w+)`(\*?) \| \S", text, re.MULTILINE)
    assert [room for room, _ in rows] == [layer for layer in layers if layer in folders]
    assert [room for room, mark in rows if mark] == [room for room, _ in rows if room in without_jax]
    assert all(f"`{layer}`" in text for layer in layers if layer != "__main__")


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_every_file_that_is_named_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    named = re.findall(r"`((?:tests|docs|jaxckpt|benchmarks)/[\w./]*)`|\]\(([\w./]+)\)", text)
    missing = {path for pair in named for path in pair if path and not (ROOT / path).exists()}
    assert missing <= {"tests/faults/crashes/"}  # exists only after the fuzzer has found an input


def test_the_citation_agrees_with_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == jaxckpt.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["title"] == PROJECT["project"]["name"]
    assert citation["abstract"] == PROJECT["project"]["description"]


def test_what_the_owner_must_still_fill_in() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    missing = {
        "pyproject.toml: project.urls": "urls" not in PROJECT["project"],
        "pyproject.toml: project.authors": "authors" not in PROJECT["project"],
        "CITATION.cff: repository-code": "repository-code" not in citation,
        "CITATION.cff: date-released": "date-released" not in citation,
        "mkdocs.yml: site_url": not re.search(r"^site_url:", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE),
    }
    # To fill one in, remove it here. Three more cannot be tested: the host's private vulnerability reporting, its
    # environment "pypi", and the trusted publisher.
    assert [place for place, is_missing in missing.items() if is_missing] == [
        "pyproject.toml: project.urls",
        "pyproject.toml: project.authors",
        "CITATION.cff: repository-code",
        "CITATION.cff: date-released",
        "mkdocs.yml: site_url",
    ]


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_no_address_is_invented(path: Path) -> None:
    assert not re.findall(r"https?://|[\w.]+@[\w-]+\.\w+", path.read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_few_rights_and_fixed_actions(path: Path) -> None:
    text = path.read_text()
    assert workflow(path)["permissions"] == {}
    uses = re.findall(r"uses: (.*)", text)
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in uses)
    for job in workflow(path)["jobs"].values():
        assert "timeout-minutes" in job
        assert {"contents": "read"}.items() <= job["permissions"].items()
    writes = re.findall(r"^ +([\w-]+): write", text, re.MULTILINE)
    assert writes == (["id-token", "attestations"] if path.stem == "release" else [])


def test_an_action_has_the_same_version_everywhere() -> None:
    found = {action for path in WORKFLOWS for action in re.findall(r"uses: (.*)", path.read_text())}
    assert len(found) == len({action.partition("@")[0] for action in found})


def test_what_a_workflow_runs_exists() -> None:
    for path in WORKFLOWS:
        text = path.read_text()
        scripts = re.findall(r"(?:benchmarks|examples|tests|\.github)/[\w./-]+", text)
        assert [name for name in scripts if not name.endswith("/") and not (ROOT / name).exists()] == []
        targets = re.findall(r"run: make ([\w-]+)", text)
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets)


def test_the_tests_workflow_runs_every_version_that_the_package_names() -> None:
    versions = workflow(ROOT / ".github/workflows/tests.yml")["jobs"]["linux"]["strategy"]["matrix"]["python"]
    named = [name.rpartition(" ")[2] for name in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert set(named) <= set(versions)
