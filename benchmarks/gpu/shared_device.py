"""One process of a job of two that share a device: saves, and restores onto other layouts, without collectives.

python shared_device.py PORT PROCESS PATH
"""

from __future__ import annotations

import os
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt


def say(text: str) -> None:
    print(f"two processes: {text}", flush=True)


port, process, path = sys.argv[1:]
is_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process), local_device_ids=None if is_cpu else [0])
say(f"{jax.process_count()} processes, {jax.device_count()} devices")
mesh = Mesh(np.array(jax.devices()), ("x",))
host = np.random.default_rng(0).random((64, 1024), np.float32)


def laid_out(spec: P) -> jax.Array:
    return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda index: host[index])


def require_equal(tree: dict[str, jax.Array]) -> None:
    for name, leaf in tree.items():
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == host[shard.index].tobytes(), name


saved = {"rows": laid_out(P("x")), "columns": laid_out(P(None, "x")), "everywhere": laid_out(P())}
jaxckpt.save_async(path, saved).wait()
say("saved")
require_equal(jaxckpt.restore(path, dict(zip(saved, [*saved.values()][::-1], strict=True))))
say("restored onto other layouts")
try:
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(saved["rows"])
    assert np.isclose(float(total), host.sum(), rtol=1e-4)
    require_equal(jaxckpt.restore(path, saved, options=jaxckpt.Options(read="shared")))
    say("collectives and a shared read work")
except Exception as error:
    say(f"no collectives: {type(error).__name__}: {str(error)[:200]!r}")
os._exit(0)  # a job whose collectives have failed does not end by itself
