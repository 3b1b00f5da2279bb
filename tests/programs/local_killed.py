"""Saves two local steps; in the second, one process is killed in a phase, and the others a moment later."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from joined import args, process_id

import jaxckpt
from jaxckpt._save import peers, publish
from jaxckpt._storage.files import FileWriter
from jaxckpt._storage.folder import Folder

pids = Path(args["local"]).parent / "pids"
pids.mkdir(exist_ok=True)
(pids / str(process_id)).write_text(str(os.getpid()))
second = False


def die() -> None:
    if second and process_id == args["victim"]:
        others = " ".join(path.read_text() for path in pids.iterdir() if path.name != str(process_id))
        subprocess.Popen(["sh", "-c", f"sleep {args.get('delay', 0.3)}; kill -9 {others}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGKILL)


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
        around(peers._Permutations, "run")
    case "write":
        around(FileWriter, "_write")
    case "written":
        around(publish.manifests, "decode")  # all have written, and the manifest has come
    case "publish":
        around(Folder, "publish")
    case "published":
        around(Folder, "publish", after=True)

mesh = Mesh(np.array(jax.devices()), ("data",))


def tree(step: int) -> dict[str, Any]:
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    values = np.arange(8 * 4096, dtype=np.float32).reshape(8, -1) + step
    return {"w": jax.make_array_from_callback(values.shape, sharding, lambda index: values[index]), "step": step}


with jaxckpt.Checkpointer(args["path"], every=100, local=args["local"], on_preemption="ignore") as steps:
    steps.save(10, tree(10), process_state={"own": process_id})
    steps.wait()
    second = True
    steps.save(20, tree(20), process_state={"own": process_id})
    steps.wait()
print("survived")
