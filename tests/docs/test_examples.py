"""The extra `examples` contains what the examples import, and docs/examples.md lists them all."""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs/examples.md").read_text()
ROWS = dict(re.findall(r"^\| \[(\S+)\]\(\.\./examples/\1\) (.*)", PAGE, re.MULTILINE))
PROGRAMS = sorted(path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb"))
packages_of_modules = functools.cache(packages_distributions)


def packages_of(extra: str) -> set[str]:
    """The packages that an extra names, also by way of other extras."""
    packages = set[str]()
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == PROJECT["name"]:
            packages |= set[str]().union(*map(packages_of, requirement.extras))
        else:
            packages.add(canonicalize_name(requirement.name))
    return packages


def code_of(name: str) -> str:
    text = (ROOT / "examples" / name).read_text()
    if not name.endswith(".ipynb"):
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")


def imports_of(code: str) -> Iterator[str]:
    """The top-level modules that a program imports, also inside functions."""
    for node in ast.walk(ast.parse(code)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            names = [node.module]
        yield from (name.partition(".")[0] for name in names)


def third_party_packages(name: str) -> set[str]:
    """The packages other than jaxckpt that an example imports."""
    modules = set(imports_of(code_of(name))) - set(sys.stdlib_module_names) - {PROJECT["name"]}
    return {canonicalize_name(package) for module in modules for package in packages_of_modules().get(module, [module])}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_imports_only_what_the_page_says_to_install(name: str) -> None:
    page_says = {"examples", *re.findall(r"pip install -e '\.\[(\w+)\]'", ROWS[name])}
    dependencies = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert third_party_packages(name) <= dependencies.union(*map(packages_of, page_says))


def test_the_extra_contains_only_what_examples_need() -> None:
    to_run_the_notebook = {"nbclient", "ipykernel"}
    assert packages_of("examples") <= to_run_the_notebook.union(*map(third_party_packages, PROGRAMS))


def test_the_development_environment_can_run_the_examples() -> None:
    assert packages_of("examples") <= packages_of("dev")


def test_the_page_lists_every_example() -> None:
    assert sorted(ROWS) == PROGRAMS
