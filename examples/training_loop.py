"""A training loop that may be killed at any moment: Flax NNX, Optax, Grain and jaxckpt.Checkpointer.

`train` is the loop to copy. It saves in the background and deletes old steps by its retention rules. When it is
started again, it resumes after the newest saved step, with the same parameters, optimizer state, dropout keys and
position in the data. The demonstration kills it, restarts it, and compares each loss with that of an uninterrupted
run. If any bit differs, the exit status is 1.

    python examples/training_loop.py                              # the demonstration; faster with JAXCKPT_DEMO_QUICK=1
    python examples/training_loop.py run --steps 90 --die-at 57   # train in the folder "run"; kill -9 after step 57
    python examples/training_loop.py run --steps 90               # resume
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # 8 simulated devices; not on a real cluster
os.environ["JAX_PLATFORMS"] = "cpu"

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

QUICK = bool(os.environ.get("JAXCKPT_DEMO_QUICK"))
BATCH, CONTEXT, WIDTH = 64, 16, 512  # BATCH: windows of text per step, over all processes


def model() -> nnx.Module:
    """Predicts the byte that follows CONTEXT bytes."""
    rngs = nnx.Rngs(0)
    embed, hidden = nnx.Embed(256, 32, rngs=rngs), nnx.Linear(CONTEXT * 32, WIDTH, rngs=rngs)
    flat, drop, out = jax.vmap(jnp.ravel), nnx.Dropout(0.1, rngs=rngs), nnx.Linear(WIDTH, 256, rngs=rngs)
    return nnx.Sequential(embed, flat, hidden, nnx.gelu, drop, out)


def windows() -> grain.IterDataset:
    """Shuffled windows of Python's argparse.py: this process's share of every batch."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
    shuffled = grain.MapDataset.source(np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)).seed(0).shuffle()
    share = shuffled.repeat()[jax.process_index() :: jax.process_count()]
    return share.batch(BATCH // jax.process_count()).to_iter_dataset()  # prefetches, in threads


def train(folder: Path, steps: int) -> None:
    """Train up to step `steps`, from the start or from the newest saved step."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    graph, *_ = nnx.split(nnx.eval_shape(model), nnx.Param, nnx.RngState)
    optimizer = optax.adamw(3e-3)

    def init() -> dict:
        _, params, rngs = nnx.split(model(), nnx.Param, nnx.RngState)
        return {"params": params, "opt_state": optimizer.init(params), "rngs": rngs}

    sharded, replicated = NamedSharding(mesh, P("data", "model")), NamedSharding(mesh, P())
    shardings = jax.tree.map(lambda leaf: sharded if leaf.ndim == 2 else replicated, jax.eval_shape(init))

    # Without out_shardings, XLA would choose the shardings, and a resumed run would use different ones.
    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def train_step(state: dict, text: jax.Array) -> tuple[dict, jax.Array]:
        def loss_of(params: nnx.State) -> tuple[jax.Array, nnx.State]:
            network = nnx.merge(graph, params, state["rngs"], copy=True)
            logits, target = network(text[:, :-1]), text[:, -1].astype(jnp.int32)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()
            return loss, nnx.state(network, nnx.RngState)  # dropout advances it

        (loss, rngs), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "rngs": rngs}, loss

    batches = iter(windows())
    with jaxckpt.Checkpointer(
        folder, every=5, keep_last=2, keep_best=("loss", "min"), keep_last_of={"opt_state": 1}
    ) as checkpoints:
        last, state = checkpoints.restore_or_init(jax.jit(init, out_shardings=shardings))
        if last is not None:
            # The position counts batches of the whole job, so all processes have the same one, for any number of them.
            batches.set_state(checkpoints.process_state("data", resplit=lambda states, count: states[:1] * count))
        print(f"from step {last or 0}", flush=True)
        for step in range((last or 0) + 1, steps + 1):
            text = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), next(batches))
            state, loss = train_step(state, text)
            print(step, float(loss), flush=True)
            data = batches.get_state()
            checkpoints.save(step, state, metrics={"loss": loss}, process_state={"data": data}, force=step == steps)


def run(folder: Path, steps: int, signal: int = 0, after: int = 0) -> tuple[int, dict[int, str]]:
    """Train in a child process, and send it a signal during the step after `after`.

    Returns its exit status, and the loss of each step as text.
    """
    losses: dict[int, str] = {}
    command = [sys.executable, __file__, str(folder), "--steps", str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        start = next(child.stdout, "").strip()
        for step, loss in map(str.split, child.stdout):
            losses[int(step)] = loss
            if int(step) == after:
                time.sleep(random.random() / 50)
                child.send_signal(signal)
    print(f"  {start} to step {max(losses, default=None)}, exit status {child.returncode}", flush=True)
    return child.returncode, losses


def demonstrate(folder: Path, steps: int, signals: list[Signals]) -> bool:
    print("An uninterrupted run", flush=True)
    status, expected = run(folder / "whole", steps)
    passed = status == 0 and len(expected) == steps
    for number, signal in enumerate([*signals, 0]):
        after = int((number + random.uniform(0.3, 0.8)) * steps / len(signals)) if signal else 0
        ending = f"{signal.name} after step {after}" if signal else "to its end"
        print(f"The second run, {ending}", flush=True)
        status, losses = run(folder / "killed", steps, signal, after)
        equal = losses.items() <= expected.items()  # including repeated steps
        print(f"  {'all' if equal else 'FAILED: not all'} {len(losses)} losses equal those of the uninterrupted run")
        passed &= equal and status in (0, {SIGKILL: -9, SIGTERM: 143}.get(signal))
    print("In the folder:", *sorted(path.name for path in (folder / "killed").iterdir()))
    return passed and steps in losses


def main() -> int:
    parser = argparse.ArgumentParser(description="A training loop that may be killed at any moment.")
    parser.add_argument("folder", nargs="?", type=Path, help="train here; without it, run the demonstration")
    parser.add_argument("--steps", type=int, default=60 if QUICK else 300)
    parser.add_argument("--die-at", type=int, default=0, metavar="STEP", help="kill -9 after this step")
    arguments = parser.parse_args()
    if arguments.folder is None:
        signals = [SIGKILL, SIGTERM] if QUICK else [SIGKILL, SIGTERM, SIGKILL]
        with tempfile.TemporaryDirectory(prefix="jaxckpt-demo-") as folder:
            return 0 if demonstrate(Path(folder), arguments.steps, signals) else 1
    if arguments.die_at:
        return run(arguments.folder, arguments.steps, SIGKILL, arguments.die_at)[0]
    train(arguments.folder, arguments.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
