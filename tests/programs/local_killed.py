"""Saves two local steps. In the second, one process is killed in a given phase, and the others a moment later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dying
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from joined import args, process_id

import jaxckpt
from jaxckpt._devices.interconnect import Interconnect
from jaxckpt._local_tier import process_folders
from jaxckpt._store.files import FileWriter
from jaxckpt._store.folder import Folder

pids = Path(args["local"]).parent / "pids"
dying.register(pids)
second = False


def die() -> None:
    if second and process_id == args["victim"]:
        dying.die(pids)


def around(holder: Any, name: str, *, after: bool = False) -> None:
    found = getattr(holder, name)

    def call(*given: Any, **named: Any) -> Any:
        if not after:
            die()
        result = found(*given, **named)
        if after:
            die()
        return result

    setattr(holder, name, call)


match args["phase"]:
    case "pass":
        around(Interconnect, "permute")
    case "write":
        around(FileWriter, "_write")
    case "written":
        around(process_folders.manifests, "decode")  # all processes have written, and the manifest has arrived
    case "publish":
        around(Folder, "publish")
    case "published":
        around(Folder, "publish", after=True)

mesh = Mesh(np.array(jax.devices()), ("data",))


def tree(step: int) -> dict[str, Any]:
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    values = np.arange(8 * 4096, dtype=np.float32).reshape(8, -1) + step
    return {"w": jax.make_array_from_callback(values.shape, sharding, lambda index: values[index]), "step": step}


tier = jaxckpt.LocalTier(args["local"])
with jaxckpt.Checkpointer(args["path"], every=100, local=tier, on_preemption="ignore") as steps:
    steps.save(10, tree(10), process_state={"own": process_id})
    steps.wait()
    second = True
    steps.save(20, tree(20), process_state={"own": process_id})
    steps.wait()
print("survived")
