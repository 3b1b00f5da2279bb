"""A job exports its sharded arrays as folders of safetensors; prints the outcome of each attempt, and who wrote what.

args: {"model": a Hugging Face folder, "out": a folder}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt
from jaxckpt._formats import direct_writes, live_export, safetensors

OUT = args["out"]
safetensors.SHARD_BYTES = 4000
written: dict[str, list[str]] = {}
write_tensors = safetensors.write_tensors
broken = ""


def write(path: str, *rest: Any, **named: Any) -> None:
    if broken and path.endswith(broken):
        raise OSError(28, "no space left")
    write_tensors(path, *rest, **named)
    written.setdefault(current, []).append(os.path.basename(path))


safetensors.write_tensors = write
outcomes: dict[str, Any] = {}
current = ""


def attempt(what: str, act: Callable[[], Any]) -> None:
    global current
    current = what
    try:
        outcomes[what] = act()
    except Exception as error:
        outcomes[what] = f"{type(error).__name__}: {error}"


mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "model"))


def spread(path: str, leaf: Any) -> P:
    dims = [dim for dim, side in enumerate(leaf.shape) if side % 4 == 0]
    return P(*("model" if dims and dim == dims[-1] else None for dim in range(len(leaf.shape))))


rules = {scan: jaxckpt.rules.huggingface_rules(args["model"], scan=scan) for scan in (False, True)}
trees = {
    scan: jaxckpt.restore(args["model"], mesh=mesh, specs=spread, rename=rules[scan], dtype=jnp.float32)
    for scan in (False, True)
}
inverse = {scan: rules[scan].inverse() for scan in (False, True)}


def export(name: str, scan: bool = False, **named: Any) -> Any:
    named = {"rename": inverse[scan], **named}
    return jaxckpt.save_async(f"{OUT}/{name}", trees[scan], format="safetensors", **named).wait().path


plan_writes = live_export.plan_writes
n_stored = 0


def planned(*arguments: Any, **named: Any) -> Any:
    global n_stored
    plan = plan_writes(*arguments, **named)
    n_stored = len(plan.stored)
    return plan


def rows(path: str, leaf: Any) -> P:
    """The spec that splits the first dimension of the leaf's tensor."""
    dim = 0 if "embed" in path or leaf.ndim == 1 else 2 if "/o/" in path else 1
    return P(*(None,) * dim, "data")


live_export.plan_writes = planned
attempt("plain", lambda: export("plain"))
attempt("stacks on the way", lambda: n_stored)
attempt("laid out", lambda: export("laid-out", mesh=mesh, specs=rows))
attempt("stacks on the way of rows", lambda: n_stored)
attempt("scanned", lambda: export("scanned", True))
direct_writes.SHARED_RUN_BYTES = 1
attempt("direct", lambda: export("direct"))
attempt("direct and scanned", lambda: export("direct-scanned", True))
coherent, direct_writes._COHERENT = direct_writes._COHERENT, frozenset()
attempt("stored", lambda: export("stored"))
direct_writes._COHERENT = coherent
attempt("exists", lambda: export("plain"))
attempt("replaced", lambda: export("plain", overwrite=True))
attempt("wrong rules", lambda: export("wrong", rename=inverse[True]))
attempt("metadata", lambda: export("metadata", metadata={"run": 7}))
broken = ".safetensors" if process_id == 1 else ""
attempt("no space", lambda: export("full"))
broken = ""
attempt("after", lambda: export("after"))
with jaxckpt.Checkpointer(f"{OUT}/run", every=2) as run:
    for step in (1, 2, 3, 4):
        state = {"params": trees[False], "step": step}
        exported = jaxckpt.formats.Export(f"{OUT}/step-{step}", rename=inverse[False].below(source="params"))
        attempt(f"step {step}", lambda: run.save(step, state, export=exported))  # noqa: B023
    attempt("kept", run.steps)
attempt("no export", lambda: run.save(6, trees[False], export="hf"))  # pyright: ignore[reportArgumentType]
run.close()
print(json.dumps({"outcomes": outcomes, "written": written}))
