"""Import rules: a folder imports only from lower folders, and few modules import tensorstore, Orbax and jax._src."""

from __future__ import annotations

import ast
import collections
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxckpt"

TENSORSTORE = [f"_store.{name}" for name in ("tensors", "hedging", "fetching", "bucket")]
"""The modules that may import tensorstore."""

JAX_PRIVATE = ["_job.job"]
"""The modules that may import JAX's private modules, for the coordination service."""

LAYERS = [
    "__main__",
    "_cli",
    "keras",
    "orbax",
    "types",
    "rules",
    "formats",
    "weights",
    "_runs",
    "_local_tier",
    "_convert",
    "_inspect",
    "_formats",
    "_restore",
    "_save",
    "_rules",
    "_sources",
    "_run_folder",
    "_store",
    "_devices",
    "_arguments",
    "_model",
    "_job",
    "_pipeline",
    "_options",
    "_keywords",
    "errors",
]
"""The rooms of the library, from top to bottom. A room imports only from rooms below it."""

WITHOUT_JAX = (
    "errors",
    "_keywords",
    "_options",
    "_pipeline",
    "_model",
    "_store",
    "_run_folder",
    "_sources",
    "_rules",
)
"""Rooms that reading needs in programs without JAX. None of their modules imports it."""

SOURCES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path.read_text()
    for path in PACKAGE.glob("**/*.py")
    if path != PACKAGE / "__init__.py"
}


parsed = functools.cache(ast.parse)
"""The tree of a source. Several tests look at each module's."""


@functools.cache
class Imports(ast.NodeVisitor):
    """All imports of a module as dotted names, except those that only type checkers see."""

    def __init__(self, source: str) -> None:
        self.on_load: set[str] = set()
        self.in_functions: set[str] = set()
        self._into = self.on_load
        self.visit(parsed(source))

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


def violations(module: str, source: str) -> list[str]:
    """The forbidden imports of a module, each with the reason."""
    imports = Imports(source)
    found: list[str] = []
    here = module.partition(".")[0]
    for name in sorted(imports.on_load | imports.in_functions):
        package, inner = [*name.split("."), ""][:2]
        if name == "jaxckpt.__version__":
            continue
        if package == "jaxckpt" and inner not in LAYERS:
            found.append(f"{name}: import it from the private module that defines it")
        elif package == "jaxckpt" and LAYERS.index(inner) < LAYERS.index(here):
            found.append(f"{name}: {inner} is above {here}")
        elif package == "jax" and here in WITHOUT_JAX:
            found.append(f"{name}: reading a checkpoint must not need JAX")
        elif package == "tensorstore" and module not in TENSORSTORE:
            found.append(f"{name}: only the storage modules may import it")
        elif (package, inner) == ("jax", "_src") and module not in JAX_PRIVATE:
            found.append(f"{name}: only these may import it: {JAX_PRIVATE}")
        elif package in ("pickle", "cloudpickle", "dill", "marshal", "shelve"):
            found.append(f"{name}: reading a checkpoint must run no code from it")
        elif package == "orbax" and name in imports.on_load and module != "orbax":
            found.append(f"{name}: it takes seconds; import it in the function that uses it")
    return found


@pytest.mark.child
def test_reading_a_manifest_loads_no_tensorstore() -> None:
    command = [sys.executable, str(Path(__file__).parent / "programs" / "manifest_imports.py"), str(PACKAGE)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    assert "tensorstore" not in loaded


def test_the_package_has_these_entries() -> None:
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py") and path.name != "__pycache__"}
    assert entries == {*LAYERS, "__init__"}


def test_no_two_modules_have_the_same_name() -> None:
    names = collections.Counter(module.rpartition(".")[2] for module in SOURCES)
    assert [name for name, count in names.items() if count > 1 and name != "__init__"] == []


def test_a_module_imports_only_from_below() -> None:
    found = {module: violations(module, source) for module, source in SOURCES.items()}
    assert {module: forbidden for module, forbidden in found.items() if forbidden} == {}


def test_a_module_has_a_docstring() -> None:
    firsts = {
        module: (ast.get_docstring(parsed(source)) or "").partition("\n")[0] for module, source in SOURCES.items()
    }
    assert {module: first for module, first in firsts.items() if len(first) <= 15} == {}
    ends = {module: first for module, first in firsts.items() if not first.endswith((".", ":"))}
    assert ends.keys() <= {"errors"}, ends


def test_only_the_package_itself_has_all() -> None:
    names = {
        module: {node.id for node in ast.walk(parsed(source)) if isinstance(node, ast.Name)}
        for module, source in SOURCES.items()
    }
    assert [module for module, found in names.items() if "__all__" in found] == []


def test_imports_between_modules_have_no_cycles() -> None:
    below = {
        module: {
            name.removeprefix("jaxckpt.")
            for found in (Imports(source).on_load | Imports(source).in_functions)
            for name in (found, found.rpartition(".")[0])
            if name.startswith("jaxckpt.") and name.removeprefix("jaxckpt.") in SOURCES
        }
        for module, source in SOURCES.items()
    }
    while free := {module for module, names in below.items() if not names & below.keys()}:
        below = {module: names for module, names in below.items() if module not in free}
    assert not below, f"circular imports: {sorted(below)}"


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("_save.save", "from jaxckpt._save.write_plan import plan_save", True),
        ("_save.save", "from jaxckpt._model import stacks", True),
        ("_save.save", "from jaxckpt._restore.restore import restore", False),
        ("_restore.restore", "from jaxckpt._save import save", True),
        ("_model.stacks", "import jaxckpt._store.store", False),
        ("_model.stacks", "from jaxckpt._store.store import Store", False),
        ("_model.stacks", "def f():\n    from jaxckpt._store.store import Store", False),
        ("_model.stacks", "if TYPE_CHECKING:\n    from jaxckpt._store.store import Store", True),
        ("_model.stacks", "if TYPE_CHECKING:\n    pass\nelse:\n    from jaxckpt._store.store import Store", False),
        ("_inspect.open", "import jaxckpt", False),
        ("_inspect.open", "from jaxckpt import restore", False),
        ("_model.stacks", "def f():\n    import jax", False),
        ("_store.folder", "from jax.sharding import Mesh", False),
        ("_store.tensors", "import tensorstore as ts", True),
        ("_inspect.open", "from tensorstore import open", False),
        ("_job.job", "from jax._src import distributed", True),
        ("_model.stacks", "from jax import _src", False),
        ("_model.stacks", "import jax._src.core", False),
        ("_formats.dcp", "try:\n    import pickle\nexcept ImportError:\n    pass", False),
        ("_formats.dcp", "def f():\n    import pickle", False),
        ("_formats.dcp", "import orbax.checkpoint as ocp", False),
        ("orbax", "import orbax.checkpoint as ocp", True),
        ("_formats.dcp", "class A:\n    from orbax import checkpoint", False),
        ("_formats.dcp", "async def f():\n    import orbax.checkpoint as ocp", True),
    ],
)
def test_the_import_rules(module: str, source: str, allowed: bool) -> None:
    assert (not violations(module, source)) == allowed
