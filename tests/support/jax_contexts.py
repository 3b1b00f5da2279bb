"""`jax.enable_x64` and `jax.set_mesh` for a `with` block, in every supported version of JAX."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Mesh


def enable_x64(on: bool) -> AbstractContextManager[Any]:
    """Turns 64-bit dtypes on or off in this thread."""
    return jax.enable_x64(on) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(on)  # jax 0.6


def set_mesh(mesh: Mesh) -> AbstractContextManager[Any]:
    """Sets the mesh of this thread."""
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)  # jax 0.6
