"""Saves and restores in four processes that have other numbers in the job than in JAX's coordination service."""

from __future__ import annotations

import shutil
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args
from renumbered import index
from sharded_tree import check, make, mesh_of

import jaxckpt

mesh, other = mesh_of(4, 2), mesh_of(2, 4)
tree = make(mesh)
info = jaxckpt.save(f"{args}/c", tree, process_state={"at": index})
assert max(info.process_bytes) <= 1.05 * info.total_bytes / 4
assert [state["at"] for state in jaxckpt.open(f"{args}/c").process_states] == [0, 1, 2, 3]
for target in (mesh, other):
    check(jaxckpt.restore(f"{args}/c", mesh=target))
check(jaxckpt.restore(f"{args}/c", mesh=other, specs=P(), options=jaxckpt.Options(read="shared")))

# No process holds the columns of the rows that it has, so they are exchanged.
columns = jax.device_put(tree["rows"], NamedSharding(mesh, P("data")))
jaxckpt.save_async(f"{args}/columns", {"rows": columns}, mesh=mesh, specs=P(None, ("data", "model"))).wait()
check({**tree, **jaxckpt.restore(f"{args}/columns")})

with pytest.raises(jaxckpt.errors.PeersDisagreeError, match="process 2 and process 0 differ"):
    jaxckpt.save(f"{args}/c", tree | {"step": int(index == 2)}, overwrite=True)


def opened() -> jaxckpt.Checkpointer:
    return jaxckpt.Checkpointer(f"{args}/run", every=10, local=jaxckpt.LocalTier(f"{args}/host {index}", every=1))


with opened() as steps:
    for step in (1, 2):
        steps.save(step, tree, process_state={"at": [index, step]})
if index == 3:
    shutil.rmtree(f"{args}/host 3")
with opened() as steps:
    step, restored = steps.restore_or_init(lambda: make(other))
    assert step == 2
    assert steps.process_state("at") == [index, 2]
    check(restored)
with opened() as steps:
    found: Any = steps.restore(2, {**tree, "rows": NamedSharding(other, P("model"))})
    assert np.array_equal(found["host"], tree["host"])
    check(found)
print("the same bits")
