"""Two processes save mostly unchanged steps; in one step, they disagree on what is unchanged. Process 0 prints the
result of each save."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt
from jaxckpt._save import staging

run_path = Path(args)
mesh = jax.make_mesh((4,), ("x",))
ROWS = jax.jit(lambda: jnp.arange(64 * 32.0).reshape(64, 32), out_shardings=NamedSharding(mesh, P("x")))
base = {"rows": ROWS(), "whole": jax.jit(lambda: jnp.arange(500.0), out_shardings=NamedSharding(mesh, P()))()}
copy = jax.jit(lambda tree: jax.tree.map(lambda x: x + 0, tree))
copies = copy(base)
lines: list[int] = []


def local(path: Path, name: str) -> np.ndarray:
    return jaxckpt.load_numpy(path)["base"][name]


def adapters(step: int) -> jax.Array:
    return jax.jit(lambda step: jnp.full((4, 4), step), out_shardings=NamedSharding(mesh, P("x")))(step)


is_in_host_memory = staging.is_in_host_memory
staging.is_in_host_memory = lambda value: False  # CPU devices simulate devices with their own memory
with jaxckpt.Checkpointer(run_path, options=jaxckpt.Options(reuse="identity")) as run:
    for step in range(4):
        if step == 3 and process_id == 1:  # delete a file that this process would link
            for file in (run_path / "00000002").glob("data-*/*float32-64x32/c/0/1/0"):
                file.unlink()
        own = copies if step == 2 and process_id == 1 else base
        run.save(step, {"base": own, "lora": adapters(step)})
        assert run.pending is not None
        info = run.pending.wait()
        lines.append(info.stored_bytes - info.reused_bytes)
staging.is_in_host_memory = is_in_host_memory

for step in (0, 1, 3):
    np.testing.assert_array_equal(local(run_path / f"{step:08d}", "rows"), np.arange(64 * 32.0).reshape(64, 32))
    np.testing.assert_array_equal(local(run_path / f"{step:08d}", "whole"), np.arange(500.0))

# By default, processes compare the content of arrays that have passed through jit.
with jaxckpt.Checkpointer(run_path.with_name("jitted")) as run:
    for step in range(2):
        run.save(step, {"base": copy(base), "lora": adapters(step)})
        assert run.pending is not None
        info = run.pending.wait()
        lines.append(info.stored_bytes - info.reused_bytes)
np.testing.assert_array_equal(local(run_path.with_name("jitted"), "rows"), np.arange(64 * 32.0).reshape(64, 32))

# Rows are saved as columns in another dtype, so that processes must exchange them.
columns = jax.make_mesh((4,), ("y",))
moved = run_path.with_name("moved")
jaxckpt.save(
    moved, base, mesh=columns, specs=lambda path, leaf: P(None, "y") if leaf.ndim > 1 else P(), dtype="bfloat16"
)
np.testing.assert_array_equal(
    jaxckpt.load_numpy(moved)["rows"], np.arange(64 * 32.0).reshape(64, 32).astype(jnp.bfloat16)
)

# A leaf on devices of one process cannot be stored on a mesh of both.
one = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))
alone = jax.make_array_from_callback((4,), one, lambda index: np.arange(4.0)[index], dtype=np.float64)
with pytest.raises(
    jaxckpt.errors.LayoutError, match=r"'a' is only on devices of process 0, but with mesh=, processes 0, 1 would"
):
    jaxckpt.save(run_path.with_name("alone"), {"a": alone}, mesh=mesh)

# The two leaves share one array in process 1, but not in process 0.
pair = {"a": base["rows"], "b": base["rows"] if process_id else copies["rows"]}
with pytest.raises(jaxckpt.errors.PeersDisagreeError, match="differs from process 0 in which leaves share one array"):
    jaxckpt.save(run_path.with_name("tied"), pair)
jaxckpt.save(run_path.with_name("tied"), {"a": base["rows"], "b": base["rows"]})
found = jaxckpt.restore(run_path.with_name("tied"), tied=True)
assert found["a"] is found["b"]
found = jaxckpt.restore(run_path.with_name("tied"))
assert found["a"] is not found["b"]
if process_id == 0:
    print(json.dumps(lines))
