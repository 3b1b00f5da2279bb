"""Every function takes the shared arguments, or arguments.md has a reason why not; the pages list the arguments of
`Checkpointer` and `Options` with their defaults."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import jaxckpt

DOCS = Path(__file__).parents[2] / "docs"

TEXT = (Path(__file__).parent / "arguments.md").read_text()


def _functions(title: str) -> list[object]:
    """The functions of a column: "Run .restore, Checkpointer .restore", or "Checkpoint .restore, .plan"."""
    found, owner = [], ""
    for name in title.split(", "):
        first, _, method = name.rpartition(".")
        owner = first.strip() or (owner if method and name.startswith(".") else "")
        home = getattr(jaxckpt, owner, getattr(jaxckpt.weights, owner, None)) if owner else None
        short = method.strip()
        homes = [home] if owner else [jaxckpt, jaxckpt.weights, jaxckpt.Checkpointer]
        found.append(next(getattr(one, short) for one in homes if short in dir(one)))
    return found


def _cells() -> list[tuple[str, str, str]]:
    """(column, argument, cell) of both tables."""
    cells: list[tuple[str, str, str]] = []
    for table in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        for row in rows[2:]:
            for argument in re.findall(r"`(\w+)`", row[0]):
                cells += [(title, argument, cell) for title, cell in zip(rows[0][1:], row[1:], strict=True)]
    return cells


@pytest.mark.parametrize(("title", "argument", "cell"), _cells())
def test_a_cell_is_what_the_function_takes(title: str, argument: str, cell: str) -> None:
    for function in _functions(title):
        takes = argument in inspect.signature(function).parameters  # type: ignore[arg-type]
        assert takes == (cell == "✓"), (function, argument)
    if cell != "✓":
        assert f"\n- {cell}: " in TEXT


def test_every_shared_argument_has_a_row() -> None:
    rows = {argument for _, argument, _ in _cells()}
    titles = dict.fromkeys(title for title, _, _ in _cells())
    takers: dict[str, set[object]] = {}
    for title in titles:
        for function in _functions(title):
            for name in inspect.signature(function).parameters:  # type: ignore[arg-type]
                takers.setdefault(name, set()).add(function)
    own = {"self", "path", "step", "init", "tree", "source", "destination", "path_a", "path_b", "directory"}
    assert {name for name, functions in takers.items() if len(functions) > 1} - own <= rows


@pytest.mark.parametrize(
    ("page", "function"), [("training-loop.md", jaxckpt.Checkpointer), ("api/options.md", jaxckpt.Options)]
)
def test_a_table_lists_all_arguments_in_order_with_their_defaults(page: str, function: Any) -> None:
    text = (DOCS / page).read_text().partition("\n## All ")[2]
    rows = re.findall(r"^\| `(\w+)` \|(?: `(.*?)`)? \| \S.* \|$", text, re.MULTILINE)
    parameters = inspect.signature(function).parameters
    assert [name for name, _ in rows] == list(parameters)
    for name, default in rows:
        shown = eval(default) if default else inspect.Parameter.empty
        assert shown == parameters[name].default, name
        assert type(shown) is type(parameters[name].default), name
