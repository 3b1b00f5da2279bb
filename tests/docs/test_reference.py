"""The API reference lists every public name."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import jaxckpt


def test_the_reference_documents_every_public_name() -> None:
    pages = (Path(__file__).parents[2] / "docs" / "api").glob("*.md")
    documented = {name for page in pages for name in re.findall(r"^::: jaxckpt\.([\w.]+)$", page.read_text(), re.M)}
    assert set(jaxckpt.__all__) - documented == set()
    for module in (jaxckpt.errors, jaxckpt.rules, jaxckpt.weights):
        public = {name for name, value in vars(module).items() if name[0] != "_" and is_public(module, value)}
        public -= {"show_count", "show_lines", "show_path"}  # for messages
        names = {name.rpartition(".")[2] for name in documented}
        assert public - names == set(), module.__name__


def is_public(module: ModuleType, value: object) -> bool:
    """Whether a module of the public API defines this class or function, or offers it from a private module."""
    home = getattr(value, "__module__", "")
    return home == module.__name__ or (module is jaxckpt.rules and home.startswith("jaxckpt."))
