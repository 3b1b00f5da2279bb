"""Restores DCP checkpoints onto meshes without torch, and compares every bit. Arguments: the folders of checkpoints."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import jax
from jax.sharding import PartitionSpec as P

import jaxckpt

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
import test_dcp

jax.config.update("jax_enable_x64", True)


def check(folder: Path, kind: str, rows: int, columns: int) -> None:
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


for name, kind, sides in itertools.product(sys.argv[1:], test_dcp.KINDS, [(2, 4), (3, 2)]):
    print(name, kind, *sides)
    check(Path(name), kind, *sides)
assert "torch" not in sys.modules
print("all checks passed")
