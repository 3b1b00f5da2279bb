"""Process 0 cannot look into the run three times before step 2. Each process prints what it has saved by the end."""

from __future__ import annotations

import errno
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt
from jaxckpt._runs.directory import Directory

require_savable = Directory.require_savable
refusals = iter(range(3))


def refuse_step_2(directory: Directory, step: Any, **arguments: Any) -> None:
    if process_id == 0 and step.number == 2 and next(refusals, None) is not None:
        raise jaxckpt.errors.StorageError(errno.EIO, "the run cannot be listed")
    require_savable(directory, step, **arguments)


Directory.require_savable = refuse_step_2  # type: ignore[method-assign]
mesh = Mesh(np.array(jax.devices()), ("data",))
whole = jax.jit(lambda step: jnp.full((len(jax.devices()), 300), step), out_shardings=NamedSharding(mesh, P("data")))
options = jaxckpt.Options(sync=False, timeout_seconds=20, when_busy=args["when_busy"])
local = jaxckpt.LocalTier(f"{args['folder']}-local", every=1) if args["local"] else None
with jaxckpt.Checkpointer(args["folder"], on_failure=args["policy"], local=local, options=options) as checkpoints:
    for step in range(1, 5):
        checkpoints.save(step, {"w": whole(step)})
        if step == 1:
            checkpoints.wait()  # so that step 2 is not skipped
        elif local is not None and (flush := checkpoints._saver.last_flush.pending) is not None:
            flush.join()
    checkpoints.wait()
    steps = checkpoints.steps()
    assert np.asarray(checkpoints.restore(steps[-1])["w"].addressable_shards[0].data)[0, 0] == steps[-1]
print(json.dumps(steps))
