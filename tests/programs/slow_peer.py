"""Process 1 is slow in a save, and dies in the next. Each process prints what it logged and raised."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt
from jaxckpt._job import rendezvous

rendezvous._SLOW_SECONDS = 0.9
lines: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
logging.getLogger("jaxckpt").addHandler(handler)
logging.getLogger("jaxckpt").setLevel(logging.INFO)
folder = Path(args)
shown: list[jaxckpt.types.Progress] = []
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
tree = jax.jit(lambda: {"w": jnp.ones((3, 3 << 19))}, out_shardings={"w": sharding})()
options = jaxckpt.Options(
    sync=False,
    timeout_seconds=4,
    object_bytes=1 << 20,
    chunk_bytes=1 << 18,
    max_bytes_per_second=1.6e6 if process_id == 1 else None,
    progress=shown.append,
)
jaxckpt.save(folder / "warm", {"w": tree["w"][:, :8]}, options=options)
shown.clear()
jaxckpt.save_async(folder / "slow", tree, options=options).wait()
slow = [line for line in lines if "waited" in line]
seen = [[[progress.done_bytes, progress.total_bytes] for progress in shown]]

# A slow restore
shown.clear()
preadv = os.preadv


def slow_preadv(*arguments: Any) -> int:
    time.sleep(0.4)
    return preadv(*arguments)


if process_id == 1:
    os.preadv = slow_preadv
jaxckpt.restore(folder / "slow", {"w": sharding}, options=options)
os.preadv = preadv
seen.append([[progress.done_bytes, progress.total_bytes] for progress in shown])


raised = ""
try:
    pending = jaxckpt.save_async(folder / "dead", tree, options=options)
    if process_id == 1:
        while pending.progress.done_bytes < pending.progress.total_bytes / 2:
            time.sleep(0.05)
        print("[]", flush=True)
        os._exit(0)
    pending.wait()
except jaxckpt.errors.PeerError as error:
    raised = f"{type(error).__name__}: {error}"
print(json.dumps([slow, raised, seen]), flush=True)
if process_id == 0:
    time.sleep(1)  # the coordination service runs here, and the others still ask it
os._exit(0)
