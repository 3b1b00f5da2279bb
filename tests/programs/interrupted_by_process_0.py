"""Process 0 is interrupted while process 1 still writes, in the middle of its own data and after it."""

from __future__ import annotations

import signal
import time
from unittest import mock

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id
from sharded_tree import mesh_of

import jaxckpt
from jaxckpt._store.files import FileWriter

write = FileWriter.write
value = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
array = jax.make_array_from_callback(value.shape, NamedSharding(mesh_of(2, 2), P("data")), value.__getitem__)
path = f"{args}/interrupted"


def save(seconds_per_object: float = 0.0) -> None:
    options = jaxckpt.Options(
        object_bytes=64,
        chunk_bytes=64,
        host_bytes=512,  # so that objects are written one after another
        timeout_seconds=60,
    )
    with mock.patch.object(FileWriter, "write", lambda *given: time.sleep(seconds_per_object) or write(*given)):
        jaxckpt.save(path, {"w": array}, overwrite=True, options=options)


signal.signal(signal.SIGALRM, signal.default_int_handler)
save()
for slow_processes in ([1], [0, 1]):
    if process_id == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        save(0.03 if process_id in slow_processes else 0.0)
        print("saved", flush=True)
    except (KeyboardInterrupt, jaxckpt.JaxckptError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    save()
