"""Restores a foreign file in a job, where each process reads its own shards, and converts it for a mesh; converts a
checkpoint to all formats, and a run; and converts one that a process lacks."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
restored = jaxckpt.restore(args["file"], mesh=mesh, specs=P("data", "model"))
for n in range(3):
    for shard in restored[f"w{n}"].addressable_shards:
        wanted = np.arange(n, n + 16 * 32, dtype=np.float32).reshape(16, 32)[shard.index]
        assert np.array_equal(shard.data, wanted)
jaxckpt.convert(args["file"], args["to"], mesh={"data": 2, "model": 4}, specs=P("data"))
again = jaxckpt.restore(args["to"], mesh=mesh)
assert again["w1"].sharding.spec == P("data")
tree = jaxckpt.load_numpy(args["from"])
jaxckpt.convert(args["from"], f"{args['to']}-copy")
assert jaxckpt.load_numpy(f"{args['to']}-copy")["text"] == tree["text"]
for name, form in (
    ("a.npz", None),
    ("a.safetensors", None),
    ("a.zarr", None),
    ("a-hf", "safetensors"),
    ("a-orbax", "orbax"),
):
    path = f"{args['to']}-{name}"
    for overwrite in (False, True):
        jaxckpt.convert(args["from"], path, format=form, select="w*", overwrite=overwrite)
    if name != "a.zarr":  # which jaxckpt does not read
        assert all(np.array_equal(value, tree[key]) for key, value in jaxckpt.load_numpy(path).items())
run = f"{args['to']}-run"
with jaxckpt.Checkpointer(run) as checkpointer:
    for step in (1, 2):
        checkpointer.save(step, again, metrics={"loss": 1 / step})
for name, form in (("orbax", "orbax"), ("jaxckpt", "jaxckpt")):
    for _ in range(2):  # the second time, all steps are complete
        jaxckpt.convert(run, f"{run}-{name}", format=form)
    converted = jaxckpt.Run(f"{run}-{name}")
    assert converted.steps() == [1, 2]
    assert converted.metrics(2) == {"loss": 0.5}
    assert np.array_equal(jaxckpt.load_numpy(converted.path(2))["w1"], tree["w1"])
said: list[str] = []
for name in ("b", "b.npz"):
    try:
        jaxckpt.convert(args["from"] if process_id == 0 else f"{args['from']}-missing", f"{args['to']}-{name}")
    except jaxckpt.JaxckptError as error:
        said.append(type(error).__name__)
print(len(restored["w0"].addressable_shards), *said)
