"""Two processes with different local folders or arguments, or with diverged replicas: prints the errors of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from joined import args, process_id

import jaxckpt

errors: dict[str, str] = {}


def attempt(what: str, act: Callable[[], Any]) -> None:
    try:
        act()
        errors[what] = ""
    except jaxckpt.JaxckptError as error:
        errors[what] = f"{type(error).__name__}: {error}"


def made(**named: Any) -> jaxckpt.Checkpointer:
    options = {"every": 100, "local": tier(), "on_preemption": "ignore", **named}
    return jaxckpt.Checkpointer(f"{args}/run", **options)


def tier(folder: str = "local", **named: Any) -> jaxckpt.LocalTier:
    return jaxckpt.LocalTier(f"{args}/{folder}", **named)


attempt("one without", lambda: made(local=None if process_id else tier()))
attempt("other copies", lambda: made(local=tier(copies=process_id)))
attempt("other domains", lambda: made(local=tier(domains=["a", f"b{process_id}"])))
attempt("other every", lambda: made(local=None, every=10 + process_id))
attempt("one domain", lambda: made(local=tier(domains=["a", "a"])))
attempt("one cannot", lambda: made(local=tier("file/below" if process_id else "local")))

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec())
parts = [jax.device_put(np.full(1000, process_id, np.float32), device) for device in jax.local_devices()]
diverged = jax.make_array_from_single_device_arrays((1000,), sharding, parts)
with made() as steps:
    attempt("diverged", lambda: (steps.save(10, {"layers": [diverged]}), steps.wait()))
    attempt("after", lambda: (steps.save(20, {"w": np.arange(9)}), steps.wait()))
    attempt("one tree is odd", lambda: (steps.save(30, {"w": object() if process_id else 1}), steps.wait()))
    attempt("both, and one tree is odd", lambda: (steps.save(100, {"w": object() if process_id else 1}), steps.wait()))
    other = 300 if process_id else 110  # 300 is due for the storage, 110 is not
    attempt("another step", lambda: (steps.save(other, {"w": np.arange(9)}), steps.wait()))
    attempt("after that", lambda: (steps.save(200, {"w": np.arange(9)}), steps.wait()))
print(json.dumps(errors))
