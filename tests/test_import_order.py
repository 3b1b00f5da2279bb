"""The module table of the design, held: a module imports only from rows above its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxckpt"

ROWS = [
    ["_errors"],
    ["_progress"],
    ["_options"],
    ["_tree"],
    ["_grid"],
    ["_coord"],
    ["_plan"],
    ["_store"],
    ["_manifest"],
    ["_layout"],
    ["_target"],
    ["_save", "_restore"],
    ["_audit"],
]
ROW_OF = {module: number for number, row in enumerate(ROWS) for module in row}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imports(module: str, *, at_run_time: bool = True) -> list[tuple[str, str]]:
    """(module, name) of each import in a module of the package; those for type checkers alone are left out."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and at_run_time and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.extend((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.extend((node.module or "", alias.name) for alias in node.names)
    return found


def test_every_module_is_in_the_table() -> None:
    assert set(MODULES) == set(ROW_OF)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_rows_above(module: str) -> None:
    for source, name in imports(module):
        if source.split(".")[0] != "jaxckpt":
            continue
        other = name if source == "jaxckpt" else source.removeprefix("jaxckpt.")
        assert ROW_OF[other] < ROW_OF[module], f"{module} imports {other}"


@pytest.mark.parametrize("module", MODULES)
def test_each_door_to_the_outside_has_one_keeper(module: str) -> None:
    sources = {source.split(".")[0] for source, _ in imports(module)}
    assert "tensorstore" not in sources or module == "_store"
    assert not sources & {"pickle", "marshal", "shelve", "orbax"}
    private = [source for source, _ in imports(module) if source.startswith("jax._src")]
    assert not private or module == "_coord"


def test_only_the_package_itself_exports() -> None:
    assert all(module.startswith("_") for module in MODULES)
