"""Restores a DCP checkpoint onto a mesh without torch, and compares every bit. Arguments: folder, kind, two sides."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
from jax.sharding import PartitionSpec as P

import jaxckpt

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
import test_dcp

jax.config.update("jax_enable_x64", True)
folder, kind, rows, columns = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
tree = jaxckpt.restore(
    folder / kind,
    mesh=jax.make_mesh((rows, columns), ("x", "y"), devices=jax.devices()[: rows * columns]),
    specs=lambda path, leaf: P("x", "y") if len(leaf.shape) == 2 else P(),
    select=test_dcp.but_opaque,
    options=jaxckpt.Options(indivisible="replicate"),
)
split = 0
for path, wanted in test_dcp.expected(folder, kind).items():
    restored = test_dcp.at(tree, path)
    assert isinstance(restored, jax.Array), path
    assert test_dcp.same(restored, wanted), path
    split += not restored.sharding.is_fully_replicated
assert split >= 2, split
assert "torch" not in sys.modules
print("read")
