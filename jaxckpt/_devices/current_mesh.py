"""The mesh that the caller has set with `jax.set_mesh`."""

from __future__ import annotations

import jax
from jax.sharding import Mesh


def mesh_in_context() -> Mesh | None:
    """The mesh of `jax.set_mesh`, if any."""
    mesh = jax.sharding.get_mesh()
    return mesh if mesh.shape else None
