"""Process 2 dies in an exchange that is complete in process 0, fails in process 1, and still runs in process 3."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt
from jaxckpt._devices.interconnect import Interconnect, exchange_context
from jaxckpt._job import rendezvous

rendezvous._EXCHANGE_SECONDS = 2.0


def gather(self: Interconnect, spans: Any, n_bytes: int, n_senders: int, own: Any) -> Any:
    if process_id == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if process_id == 0:
        return {reader: np.zeros(n_bytes, np.uint8) for reader in spans}
    with exchange_context(self._mesh):
        if process_id == 1:
            raise RuntimeError("Connection closed by peer")
        time.sleep(600)


mesh = Mesh(np.array(jax.devices()), ("data",))
tree = jax.jit(lambda: {"w": jnp.ones((64, 64))}, out_shardings={"w": NamedSharding(mesh, P())})()
jaxckpt.save(f"{args}/c", tree)
Interconnect.gather = gather  # type: ignore[method-assign]
try:
    jaxckpt.restore(f"{args}/c", mesh=mesh, options=jaxckpt.Options(timeout_seconds=4, read="shared"))
except jaxckpt.errors.PeerError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
if process_id == 0:
    time.sleep(2)  # the coordination service runs here, and the others still ask it
os._exit(0)
