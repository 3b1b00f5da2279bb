"""Steps that hold the same data as the step before: training is stuck, or the loop saves a stale copy of the state.

Steps are compared by the digests of their objects, which each manifest has. Only floats count, if the step has any: a
step counter grows even if the parameters no longer change.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import msgspec

from jaxckpt._model import typed_json


class _Stack(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def objects(self) -> dict[str, tuple[int, str]]: ...


class _StackObjects(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    objects: dict[str, tuple[int, str]]


class _ManifestObjects(msgspec.Struct, frozen=True):
    """The members of a manifest that are compared. msgspec skips the others, which takes no time."""

    stacks: list[_StackObjects]


def data_digest(stacks: list[_Stack]) -> str:
    """A digest of the data in these stacks. Empty if there is none."""
    floats = [stack for stack in stacks if "float" in stack.dtype or "complex" in stack.dtype]
    compared = [(stack.name, stack.dtype, sorted(stack.objects.items())) for stack in floats or stacks if stack.objects]
    return hashlib.sha256(repr(compared).encode()).hexdigest() if compared else ""


def manifest_data_digest(content: bytes) -> str:
    """The same, of a manifest that this process has just encoded."""
    return data_digest([*typed_json.decode(content, _ManifestObjects).stacks])
