"""The module table of the design, held: a module imports only from rows above its own, and each door has one keeper."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxckpt"

# One list a row. Those whose module is not written yet keep its place.
ROWS = [
    ["_errors"],
    ["_progress"],
    ["_options", "_threads", "_clock"],
    ["_tree"],
    ["_grid"],
    ["_coord"],
    ["_plan"],
    ["_save_plan"],
    ["_zarr"],
    ["_pieces"],
    ["_store"],
    ["_files"],
    ["_folder", "_bucket"],
    ["_place"],
    ["_manifest"],
    ["_layout"],
    ["_source"],
    ["_shards"],
    ["_unpickle"],
    ["_npz", "_protobuf", "_safetensors", "_torch"],
    ["_rank_files"],
    ["_dcp", "_orbax", "_mindspore", "_oneflow", "_colossalai"],
    ["_formats"],
    ["_target"],
    ["_draft"],
    ["_exchange"],
    ["_staging", "_reading"],
    ["_handover", "_agreement", "_background", "_claim"],
    ["_publish"],
    ["_save", "_restore"],
    ["_drawing"],
    ["_audit", "_verify", "_diff"],
    ["_export", "_orbax_out", "_report"],
    ["_convert"],
    ["_checkpointer"],
    ["orbax"],
    ["_terminal"],
    ["_arguments", "_listing", "_results", "_tree_view"],
    ["_cli"],
    ["__main__"],
]
PUBLIC = ("orbax",)
"""What is imported by its own name, and not with the package."""

ROW_OF = {module: number for number, row in enumerate(ROWS) for module in row}
SOURCES = {path.stem: path.read_text() for path in PACKAGE.glob("*.py") if path.stem != "__init__"}


class Imports(ast.NodeVisitor):
    """All that a module imports, in whatever form, as dotted names; but for what only type checkers see."""

    def __init__(self, source: str) -> None:
        self.on_load: set[str] = set()
        self.in_functions: set[str] = set()
        self._into = self.on_load
        self.visit(ast.parse(source))

    def visit_Import(self, node: ast.Import) -> None:
        self._into.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = ".".join(filter(None, ["jaxckpt" if node.level else "", node.module]))
        self._into.update(f"{source}.{alias.name}" for alias in node.names)

    def visit_If(self, node: ast.If) -> None:
        type_checking = ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for child in node.orelse if type_checking else [*node.body, *node.orelse]:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside, self._into = self._into, self.in_functions
        self.generic_visit(node)
        self._into = outside

    visit_AsyncFunctionDef = visit_FunctionDef


def offences(module: str, source: str) -> list[str]:
    """What a module imports that it must not, and why not."""
    imports = Imports(source)
    found: list[str] = []
    for name in sorted(imports.on_load | imports.in_functions):
        package, inner = [*name.split("."), ""][:2]
        if package == "jaxckpt" and inner not in ROW_OF:
            found.append(f"{name}: import from the private module that has it")
        elif package == "jaxckpt" and ROW_OF[inner] >= ROW_OF[module]:
            found.append(f"{name}: its row is not above that of {module}")
        elif package == "tensorstore" and module not in ("_store", "_folder", "_bucket"):
            found.append(f"{name}: only the stores do")
        elif (package, inner) == ("jax", "_src") and module != "_coord":
            found.append(f"{name}: only _coord does, for the coordination service")
        elif package in ("pickle", "cloudpickle", "dill", "marshal", "shelve"):
            found.append(f"{name}: reading a checkpoint must run no code from it")
        elif package == "orbax" and name in imports.on_load and module != "orbax":
            found.append(f"{name}: it takes seconds; import it in the function that uses it")
    return found


def test_every_module_has_a_row() -> None:
    assert SOURCES.keys() <= ROW_OF.keys()
    assert not list(PACKAGE.glob("*/**/*.py")), "a flat package: modules in folders have no row"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_module_imports_only_what_its_row_allows(module: str) -> None:
    assert not offences(module, SOURCES[module])


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_only_the_package_itself_exports(module: str) -> None:
    assert module.startswith("_") or module in PUBLIC
    names = [node.id for node in ast.walk(ast.parse(SOURCES[module])) if isinstance(node, ast.Name)]
    assert "__all__" not in names


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("_save", "from jaxckpt._save_plan import plan_save", True),
        ("_save", "from jaxckpt import _plan as plans", True),
        ("_save", "from jaxckpt._restore import restore", False),  # the same row
        ("_restore", "from jaxckpt import _save", False),
        ("_plan", "import jaxckpt._store", False),
        ("_plan", "from . import _store", False),
        ("_plan", "from ._store import Store", False),
        ("_plan", "def f():\n    from jaxckpt._store import Store", False),
        ("_plan", "if TYPE_CHECKING:\n    from jaxckpt._store import Store", True),
        ("_plan", "if TYPE_CHECKING:\n    pass\nelse:\n    from jaxckpt._store import Store", False),
        ("_audit", "import jaxckpt", False),
        ("_audit", "from jaxckpt import restore", False),
        ("_store", "import tensorstore as ts", True),
        ("_audit", "from tensorstore import open", False),
        ("_coord", "from jax._src import distributed", True),
        ("_plan", "from jax import _src", False),
        ("_plan", "import jax._src.core", False),
        ("_foreign", "try:\n    import pickle\nexcept ImportError:\n    pass", False),
        ("_foreign", "def f():\n    import pickle", False),
        ("_foreign", "import orbax.checkpoint as ocp", False),
        ("orbax", "import orbax.checkpoint as ocp", True),
        ("_foreign", "class A:\n    from orbax import checkpoint", False),
        ("_foreign", "async def f():\n    import orbax.checkpoint as ocp", True),
    ],
)
def test_the_rules_themselves(module: str, source: str, allowed: bool) -> None:
    assert (not offences(module, source)) == allowed
