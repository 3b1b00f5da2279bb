"""Typed PRNG keys, whose dtype only JAX knows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt._model.leaves import SavedLeaf


@functools.cache
def key_dtype(impl: str) -> Any:
    """The dtype of PRNG keys of an implementation. Raises ValueError if JAX has no implementation of that name."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


@dataclass(frozen=True, slots=True)
class TypedLeaf(SavedLeaf):
    """A leaf of a checkpoint with the dtype that it has in JAX: the leaf argument of the user's functions."""

    @property
    def dtype(self) -> Any:
        """Dtype that the user sees. Raises ValueError for PRNG keys of an implementation that JAX does not have."""
        return key_dtype(self.record.impl or "") if self.kind == "key" else self.stored_dtype
