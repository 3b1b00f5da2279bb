"""Types of leaves beyond arrays and Python values: how the state of a leaf is read and restored."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxckpt._keywords import explain_keywords
from jaxckpt._model.values import PYTHON_KINDS, is_utf8
from jaxckpt.errors import InputError, show_path

_PROTOCOLS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
"""Methods that return and set an object's state. The first pair that a class has is used."""


@dataclass(frozen=True, slots=True)
class LeafType:
    """How leaves of a type are saved and restored."""

    name: str
    """The type's name in a checkpoint."""

    to_state: Callable[[Any], Any]
    """The leaf's state: a tree."""

    from_state: Callable[[Any], Any] | None
    """Creates a leaf from a state, if that is possible without the leaf of a target."""

    set_state: Callable[[Any, Any], object] | None
    """Sets the state of a target's leaf, if leaves of the type are mutable."""

    cls: type
    """The type itself."""

    def is_named(self, name: str) -> bool:
        """Whether a recorded name means this class. The module may differ, unless a name was given."""
        if self.name != full_name(self.cls) or name in _NAMES:
            return self.name == name
        return self.name.rpartition(".")[2] == name.rpartition(".")[2]


_TYPES: dict[type, LeafType] = {}

_NAMES: dict[str, type] = {}
"""The registered type of each name."""


@explain_keywords
def register_leaf(
    cls: type,
    *,
    to_state: Callable[[Any], Any],
    from_state: Callable[[Any], Any] | None = None,
    set_state: Callable[[Any, Any], object] | None = None,
    name: str | None = None,
) -> None:
    """Allow leaves of a type that jaxckpt does not know. Every process calls this before it saves or restores. A second
    call for a class replaces the first.

    A checkpoint stores the state of such a leaf as a part of the tree, and the name of the type. A program that has not
    registered the type gets the state. jaxckpt imports nothing and calls only the functions that are passed here.

    Objects with the methods `state_dict` and `load_state_dict`, or `get_state` and `set_state`, need no registration:
    their state is saved, and restored into the object in the target.

    Args:
        cls: The class of the leaves; its subclasses are not included. JAX must treat the instances as leaves: a pytree
            is a container and needs no registration.
        to_state: Returns a leaf's state: a tree of arrays, Python values and containers, as for `save`. A dict of JSON
            values is such a tree.
        from_state: Returns a new leaf with this state.
        set_state: Called with a leaf of the target and a state; changes the leaf. Without it, the result of
            `from_state` replaces the leaf of the target. At least one of the two is required. Without `from_state`, a
            restore without a target returns the state.
        name: The name in the checkpoint, "module.Class" by default. Pass the old name if the class was renamed.

    Raises:
        InputError: jaxckpt takes the type as it is, or another class has this name.

    Examples:
        >>> import decimal, jaxckpt
        >>> jaxckpt.register_leaf(decimal.Decimal, to_state=str, from_state=decimal.Decimal)
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/leaf", {"rate": decimal.Decimal("0.10")}, overwrite=True)
        >>> jaxckpt.restore("/tmp/jaxckpt-doc/leaf")
        {'rate': Decimal('0.10')}
    """
    if not isinstance(cls, type):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"register_leaf takes a class, found {cls!r}")
    if is_plain(cls) or cls in (dict, list, tuple, type(None)):
        raise InputError(f"{cls.__qualname__} needs no register_leaf: save and restore take it as it is")
    functions = {"to_state": to_state, "from_state": from_state, "set_state": set_state}
    for argument, function in functions.items():
        if not callable(function) and (function is not None or argument == "to_state"):
            raise InputError(f"register_leaf({cls.__qualname__}): {argument} must be a function, found {function!r}")
    if from_state is None and set_state is None:
        raise InputError(f"register_leaf({cls.__qualname__}) needs from_state=, set_state= or both, to restore it")
    name = full_name(cls) if name is None else name
    if not isinstance(name, str) or not name or not is_utf8(name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"register_leaf({cls.__qualname__}): name must be a non-empty str (UTF-8), found {name!r}")
    other = _NAMES.get(name, cls)
    if full_name(other) != full_name(cls):
        raise InputError(f"register_leaf({cls.__qualname__}): {full_name(other)} has the name {name!r}; give another")
    _TYPES.pop(other, None)  # a notebook has redefined a class
    for old in [old for old, leaf_class in _NAMES.items() if leaf_class is cls]:
        del _NAMES[old]
    _TYPES[cls] = LeafType(name, to_state, from_state, set_state, cls)
    _NAMES[name] = cls


def is_plain(cls: type) -> bool:
    """Whether leaves of this type are stored directly, without a state."""
    if cls in PYTHON_KINDS or cls in (np.ndarray, np.memmap) or issubclass(cls, np.generic):
        return True
    jax = sys.modules.get("jax")  # before a program imports JAX, it has no types of JAX
    return jax is not None and issubclass(cls, (jax.Array, jax.ShapeDtypeStruct, jax.sharding.Sharding))


def full_name(cls: type) -> str:
    """Module and name of a class, as recorded in a checkpoint."""
    return f"{cls.__module__}.{cls.__qualname__}".encode(errors="backslashreplace").decode()


def is_registered(cls: type) -> bool:
    return cls in _TYPES


def registered(name: str) -> LeafType | None:
    """The type that is registered under a name, if any."""
    return _TYPES[_NAMES[name]] if name in _NAMES else None


def leaf_type(cls: type) -> LeafType | None:
    """How leaves of this type are saved and restored; None for plain types and for types that cannot be saved."""
    return _TYPES.get(cls) or _type_from_methods(cls)


@functools.cache
def _type_from_methods(cls: type) -> LeafType | None:
    for give, take in _PROTOCOLS:
        if callable(getattr(cls, give, None)) and callable(getattr(cls, take, None)):
            return LeafType(full_name(cls), operator.methodcaller(give), None, functools.partial(_call, take), cls)
    return None


def _call(method: str, leaf: Any, state: Any) -> object:
    return getattr(leaf, method)(state)


def call_user_function(function: Callable[..., Any], doing: str, path: str, *arguments: Any) -> Any:
    """The result of a user's function. An exception of the function gets a note that names the leaf."""
    try:
        return function(*arguments)
    except Exception as error:
        error.add_note(f"jaxckpt: raised while {doing} {show_path(path)}")
        raise
