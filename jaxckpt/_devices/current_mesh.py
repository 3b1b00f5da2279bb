"""The mesh that the caller has set with `jax.set_mesh`, in every version of JAX."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

if hasattr(jax.sharding, "get_mesh"):
    from jax.sharding import get_mesh
else:  # jax 0.6 and 0.7 set a mesh, but have no public function that returns it
    from jax._src.mesh import get_concrete_mesh as get_mesh


def mesh_in_context() -> Mesh | None:
    """The mesh of `jax.set_mesh`, or of `jax.sharding.use_mesh` in jax 0.6, if any."""
    mesh = get_mesh()
    return mesh if mesh is not None and mesh.shape else None  # pyright: ignore[reportUnnecessaryComparison]
