"""The API on one page, for language models: each public name's signature, and the first sentence of its docstring.

    python docs/api_summary.py    print it

The site has it as api/summary.md (hooks.py).
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parent.parent

_COLUMNS = 84
_MODULES = ("errors", "formats", "keras", "orbax", "rules", "types", "weights")
_FOR_MESSAGES = {"show_count", "show_lines", "show_path"}

# Programs get objects of these classes, and do not create them.
_RETURNED = {"Checkpoint", "LazyLeaf", "PendingSave", "Step"}

_HEAD = """# API summary

This page has the signature of every public name and the first sentence of its docstring. Properties are shown as
attributes. The [API reference](index.md) adds arguments, errors and examples.
"""


def summary() -> str:
    """The page."""
    package = griffe.load("jaxckpt", search_paths=[ROOT])
    assert isinstance(package, griffe.Module)
    assert package.exports is not None
    sections = [_section(package, sorted(str(name) for name in package.exports))]
    for name in _MODULES:
        module = package.members[name]
        assert isinstance(module, griffe.Module)
        sections.append(_section(module, _public_names(module)))
    return "\n".join([_HEAD, *sections])


def _public_names(module: griffe.Module) -> list[str]:
    """The classes and functions that a module defines. If it defines none, the names that it takes from others."""
    public = {name: member for name, member in module.members.items() if name[0] != "_" and name not in _FOR_MESSAGES}
    own = [name for name, member in public.items() if not member.is_alias and (member.is_class or member.is_function)]
    return own or [
        name for name, member in public.items() if isinstance(member, griffe.Alias) and "jaxckpt." in member.target_path
    ]


def _section(module: griffe.Module, names: list[str]) -> str:
    lines = [line for name in names for line in _definition(_target(module.members[name]))]
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--line-length",
        str(_COLUMNS),
        "--stdin-filename",
        "names.pyi",
        "-",
    ]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    return f"## {module.path}\n\n{_first_sentence(module)}\n\n```python\n{done.stdout}```\n"


def _target(member: griffe.Object | griffe.Alias) -> griffe.Object:
    return member.final_target if isinstance(member, griffe.Alias) else member


def _definition(value: griffe.Object, indent: str = "") -> Iterator[str]:
    """A class, a function or an attribute as in a stub file."""
    inside = indent + "    "
    if isinstance(value, griffe.Class):
        bases = ", ".join(str(base) for base in value.bases)
        yield f"{indent}class {value.name}({bases}):" if bases else f"{indent}class {value.name}:"
        yield from _docstring(_first_sentence(value), inside)
        for member in map(_target, value.members.values()):
            is_public = member.name[0] != "_" or member.name == "__getitem__"
            if (is_public and _first_sentence(member)) or (member.name == "__init__" and _is_created(value)):
                yield from _definition(member, inside)
    elif isinstance(value, griffe.Function):
        signature = str(value.signature())
        if isinstance(value.parent, griffe.Class) and "staticmethod" not in value.labels:  # griffe leaves self out
            name, _, others = signature.partition("(")
            first = "cls" if "classmethod" in value.labels else "self"
            signature = f"{name}({first}{'' if others.startswith(')') else ', '}{others}"
        yield from (f"{indent}@{label}" for label in ("classmethod", "staticmethod") if label in value.labels)
        yield f"{indent}{'async ' * ('async' in value.labels)}def {signature}:"
        yield from _docstring(_first_sentence(value), inside) or [f"{inside}..."]
    elif isinstance(value, griffe.Attribute):
        default = "" if value.value is None else f" = {value.value}"
        yield f"{indent}{value.name}: {value.annotation}{default}"
        yield from _docstring(_first_sentence(value), indent)


def _is_created(value: griffe.Class) -> bool:
    """Whether programs call the class, and it has a constructor other than that of a dataclass."""
    return not (value.module.name == "errors" or value.name in _RETURNED or "dataclass" in value.labels)


def _docstring(sentence: str, indent: str) -> list[str]:
    if not sentence:
        return []
    lines = textwrap.wrap(f'"""{sentence}"""', _COLUMNS - len(indent), break_long_words=False, break_on_hyphens=False)
    return [indent + line for line in lines]


def _first_sentence(value: griffe.Object) -> str:
    """The first sentence of an object's docstring. That of a field can be in the docstring of its class."""
    text = "" if value.docstring is None else value.docstring.value
    if not text and isinstance(value, griffe.Attribute) and value.parent is not None and value.parent.docstring:
        for section in value.parent.docstring.parse("google"):
            if isinstance(section, griffe.DocstringSectionAttributes):
                text = next((field.description for field in section.value if field.name == value.name), text)
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r'(?<=[.])\s+(?=[A-Z0-9`"])', paragraph, maxsplit=1)[0]


if __name__ == "__main__":
    print(summary(), end="")
