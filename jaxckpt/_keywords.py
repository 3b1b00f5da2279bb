"""Unknown arguments and attributes: the error says what jaxckpt calls what another library's name stands for."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxckpt import errors

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[Any])

_CONSTRUCTED_BY = {"Checkpoint": "jaxckpt.open(path)"}
"""The public classes that a program does not create itself, and what creates them."""

_public: dict[str, Callable[..., Any]] = {}
"""The functions below which `explain_keywords` decorates, by qualified name."""


@functools.cache
def names_of_others() -> Mapping[str, Mapping[str, Any]]:
    """What other libraries call things: `_keywords.toml`, which only an error needs."""
    import tomllib

    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def explain_keywords(function: F) -> F:
    """A public function whose TypeError for an unknown keyword argument says what jaxckpt calls it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            parameters = inspect.signature(function).parameters
            problems = [_unknown_keyword(function, parameters, name) for name in kwargs if name not in parameters]
            called = function.__qualname__.removesuffix(".__init__")
            hints = filter(None, map(hint_for_options, args))
            problems += [f"{called} accepts no positional CheckpointManagerOptions{hint}" for hint in hints]
            if called in _CONSTRUCTED_BY and len(args) < sum(one.default is one.empty for one in parameters.values()):
                problems.append(f"use {_CONSTRUCTED_BY[called]}, which returns a {called}")
            if not problems:  # any other error, possibly from within the function
                raise
        raise TypeError("\n".join(problems))

    _public[function.__qualname__] = call
    return call  # pyright: ignore[reportReturnType]


def explain_names(cls: C) -> C:
    """A public class whose errors for unknown keyword arguments and attributes say what jaxckpt calls them."""
    for name, member in [*vars(cls).items()]:
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, explain_keywords(member))
    cls.__getattr__ = _explain_attribute
    return cls


def hint_for_options(value: object) -> str:
    """What to pass instead of Orbax's options; empty for any other value."""
    if type(value).__name__ != "CheckpointManagerOptions":
        return ""
    return ": pass its arguments to jaxckpt.Checkpointer instead, such as keep_last= for max_to_keep"


def hint_for_args(value: object) -> str:
    """What to pass instead of Orbax's `ocp.args`; empty for any other value."""
    kind = type(value)
    if not any(base.__name__ == "CheckpointArgs" and base.__module__.startswith("orbax.") for base in kind.__mro__):
        return ""
    return (
        f"found Orbax's {kind.__name__} in place of a tree: pass the tree itself, without ocp.args, and several items"
        " as one dict"
    )


def _explain_attribute(self: object, name: str) -> Any:
    """Python calls this after it has found no attribute of that name."""
    if not name.startswith("_"):  # Python looks for many of these
        for hints in names_of_others()["attributes"].values():
            for cls in type(self).__mro__:
                if (hint := hints.get(cls.__name__, {}).get(name)) is not None:
                    raise AttributeError(f"{type(self).__name__} has no attribute {name}: {hint}", name=name)
    return object.__getattribute__(self, name)  # raises Python's own error, or the AttributeError of a property


def missing_module_attribute(name: str) -> str:
    """The message for a name that the package does not have."""
    error = getattr(errors, name, None)
    is_error = isinstance(error, type) and error.__module__ == errors.__name__
    own_name = f"errors.{name}" if is_error else _own_name(name)
    return f"module 'jaxckpt' has no attribute {name!r}" + (f": use jaxckpt.{own_name}" if own_name else "")


def _own_name(name: str) -> str:
    """What follows "jaxckpt." in place of a name that the package does not have; empty if nothing is known."""
    tables = names_of_others()
    modules = (module for module, names in tables["modules"].items() if name in names.split())
    return tables["package"].get(name) or next((f"{module}.{name}" for module in modules), "")


def explain_missing_names(module: str) -> Callable[[str], Any]:
    """PEP 562's __getattr__ for a public module: its error suggests the closest name of the module."""

    def missing(name: str) -> Any:
        near: list[str] = []
        if not name.startswith("_"):
            public = [own for own in vars(sys.modules[module]) if not own.startswith("_")]
            known = _own_name(name).rpartition(".")[2]
            near = [known] if known in public else difflib.get_close_matches(name, public, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)

    return missing


def _unknown_keyword(function: Callable[..., Any], parameters: Mapping[str, Any], name: str) -> str:
    """The message for a keyword that a function does not have."""
    called = function.__qualname__.removesuffix(".__init__")
    owner = called.rpartition(".")[0]
    if "options" in parameters and name in _parameters("Options"):
        hint = f": pass options=jaxckpt.Options({name}=…)"
    elif name in _parameters(owner):
        hint = f": it is an argument of {owner}"
    elif name in (instead := names_of_others()["of_function"].get(called, {})):
        hint = f": {instead[name]}"
    else:
        hint = _meaning(name, parameters) or _typo(name, parameters) or _argument_of_other(called, name)
        if called == "Run" and "Checkpointer" in hint:
            hint = f": a Run only reads{hint.replace(':', ';', 1)}"
    return f"{called} has no argument {name}{hint}"


def _parameters(called: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a public function, or of a class; none if there is none of that name."""
    function = _public.get(called) or _public.get(f"{called}.__init__")
    return {} if function is None else inspect.signature(function).parameters


def _meaning(name: str, parameters: Mapping[str, Any]) -> str:
    """What another library's argument is called here; empty if no library has it."""
    for hints in names_of_others()["other"].values():
        if name in hints:
            return f": {hints[name]}"
    for library, names in names_of_others()["same"].items():
        if name in names:
            here, theirs = ("", "use") if library == "no_library" else (" here", f"{library}'s {name} is")
            homes = [home.rpartition(".") for home in names[name].split()]
            own_name = next((ours for _, _, ours in homes if ours in parameters), None)
            if own_name is not None:
                return f": {theirs} {own_name}{here}"
            home, _, ours = homes[0]
            if home == "Options" and "options" in parameters:
                return f": {theirs} options=jaxckpt.Options({ours}=…) here"
            return f": {theirs} {ours} of jaxckpt.{home}"
    return ""


_CLOSE = 0.85
"""The least similarity of a misspelled name: of 6 letters one may be missing, as in "selct", and none be wrong."""


def _typo(name: str, parameters: Mapping[str, Any]) -> str:
    """The name that a misspelled or incomplete keyword resembles; empty if there is none."""
    options = _parameters("Options") if "options" in parameters else ()
    names = [ours for ours in (*parameters, *options) if ours != "self"]
    without_unit = [ours for ours in names if ours.startswith(f"{name}_")]
    near = without_unit if len(without_unit) == 1 else difflib.get_close_matches(name.lower(), names, 1, _CLOSE)
    if not near:
        return ""
    return f": did you mean {near[0]}?" if near[0] in parameters else f": did you mean Options({near[0]}=…)?"


def _argument_of_other(called: str, name: str) -> str:
    """The public function or method that has this argument; empty if none has.

    First the method of a run with the same name, then the functions that most programs call.
    """
    package = importlib.import_module("jaxckpt")
    homes = dict.fromkeys(package.__all__, "")
    for module in ("rules", "weights"):
        homes |= dict.fromkeys(dir(importlib.import_module(f"jaxckpt.{module}")), f"{module}.") | homes
    _ = [getattr(package, own) for own in package.__all__]  # whose modules decorate their functions when imported
    function = called.rpartition(".")[2]
    first = [f"Run.{function}", f"Checkpointer.{function}", "restore", "save", "save_async", "convert", "Checkpointer"]
    # A Run first, because a Checkpointer has its methods too.
    others = sorted(place.removesuffix(".__init__") for place in _public)
    others.sort(key=lambda place: not place.startswith("Run"))
    for place in [*first, "Checkpointer.save", *others]:
        home = homes.get(place.partition(".")[0])
        if home is not None and place not in _CONSTRUCTED_BY and name != "self" and name in _parameters(place):
            return f": it is an argument of jaxckpt.{home}{place}"
    return ""
