"""Train on one mesh, resume on three meshes, serve without a mesh, all from one checkpoint.

A small byte-level transformer learns to write Python from the source of the standard library. Each line below
is a separate process, which sees only the given number of (simulated CPU) devices:

    train   8 devices, mesh 2x4   save at step K, continue to step N: the reference for the other runs
    resume  8 devices, mesh 2x4   restore, train to step N: all losses and the final state are bitwise equal
    resume  6 devices, mesh 3x2   restore the same bits, train to step N: losses equal within a tolerance
    resume  4 devices, mesh 4x1   as above
    serve   1 device,  no mesh    load the parameters as NumPy arrays, and generate text

The checkpoint is written once and never converted. If any check fails, the exit status is 1.

    python examples/train_reshard_serve.py                          # 70 s on two idle cores
    JAXCKPT_DEMO_QUICK=1 python examples/train_reshard_serve.py     # 15 s; too short to learn any Python
    python examples/train_reshard_serve.py --directory demo         # keep the checkpoint

It needs jaxckpt, optax and rich. It needs no network and no accelerator.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import jaxckpt

QUICK = bool(os.environ.get("JAXCKPT_DEMO_QUICK"))
SAVE_AT, STEPS = (12, 24) if QUICK else (560, 600)
BATCH = 12  # sequences per step, over all devices; divisible by 2, 3 and 4 mesh rows
CORPUS_BYTES = 4_000_000
SEED = 0

TRAIN_MESH = "2x4"
RESUME_MESHES = ("2x4", "3x2", "4x1")

# Another mesh adds the same numbers in another order, so the last bits of its losses may differ. Over the 40
# steps after the save, the losses of these meshes differ by at most 6e-7. Errors cause larger differences:
# 2e-4 if the first moments of one norm (96 numbers) are lost, 4e-2 if all are lost, 1e-2 if the step is off by one.
LOSS_TOLERANCE = 2e-5

Params = dict[str, Any]
State = dict[str, Any]

console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)


# The model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A decoder over bytes. Its sizes are chosen so that every mesh above can shard it."""

    blocks: int = 1 if QUICK else 3
    width: int = 48 if QUICK else 96
    heads: int = 4
    context: int = 32 if QUICK else 128

    def init(self, key: jax.Array) -> Params:
        keys = iter(jax.random.split(key, 2 + 4 * self.blocks))
        width, heads, head_width = self.width, self.heads, self.width // self.heads

        def weight(*shape: int, fan_in: int) -> jax.Array:
            return jax.random.normal(next(keys), shape) * fan_in**-0.5

        return {
            "embed": weight(256, width, fan_in=1),
            "blocks": [
                {
                    "norm1": jnp.ones(width),
                    "qkv": weight(width, 3, heads, head_width, fan_in=width),
                    "out": weight(heads, head_width, width, fan_in=width),
                    "norm2": jnp.ones(width),
                    "up": weight(width, 4 * width, fan_in=width),
                    "down": weight(4 * width, width, fan_in=4 * width),
                }
                for _ in range(self.blocks)
            ],
            "norm": jnp.ones(width),
            "head": weight(width, 256, fan_in=width),
        }

    def logits(self, params: Params, tokens: jax.Array) -> jax.Array:
        """int[batch, time] -> float32[batch, time, 256]."""
        x = params["embed"][tokens]
        for block in params["blocks"]:
            hidden = rms_norm(x, block["norm1"])
            q, k, v = jnp.einsum("btd,dchk->cbthk", hidden, block["qkv"])
            attended = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            x = x + jnp.einsum("bthk,hkd->btd", attended, block["out"])
            x = x + jax.nn.gelu(rms_norm(x, block["norm2"]) @ block["up"]) @ block["down"]
        return rms_norm(x, params["norm"]) @ params["head"]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding, which has no parameters (Su et al., 2021, arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


# Shardings --------------------------------------------------------------------------------------------------

# Keyed by the last name in a leaf's path, so that Adam's two moments are sharded like their parameter. "model"
# splits heads and hidden units (tensor parallel), "data" splits the width (FSDP). Other leaves are replicated.
SPECS = {
    "embed": P("model", "data"),
    "qkv": P("data", None, "model", None),
    "out": P("model", None, "data"),
    "up": P("data", "model"),
    "down": P("model", "data"),
    "head": P("data", "model"),
}


def name_of(path: tuple[Any, ...]) -> str:
    """The path in jaxckpt's form, such as "params/blocks/0/qkv"."""
    return keystr(path, simple=True, separator="/")


def spec_of(name: str) -> P:
    return SPECS.get(name.rsplit("/", 1)[-1], P())


def make_mesh(shape: str) -> Mesh:
    """The mesh with a name such as "2x4", over all devices that this process sees."""
    data, model = map(int, shape.split("x"))
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


# Training ---------------------------------------------------------------------------------------------------


def corpus() -> bytes:
    """The standard library's top-level modules, in alphabetical order."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"".join(source.read_bytes() for source in sources)[:CORPUS_BYTES]


class Trainer:
    """The training step for one model on one mesh."""

    def __init__(self, model: Model, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        schedule = optax.warmup_constant_schedule(0.0, 4e-3, warmup_steps=20)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

        shapes = jax.eval_shape(self._init, jax.random.key(SEED))
        self.target: State = jax.tree.map_with_path(self._place, shapes)
        """The state on this mesh as shapes, dtypes and shardings, without any array memory."""

        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.target)
        replicated = NamedSharding(mesh, P())
        self.init = jax.jit(self._init, out_shardings=shardings)
        self.step = jax.jit(self._step, out_shardings=(shardings, replicated), donate_argnums=0)
        self.corpus = jax.device_put(np.frombuffer(corpus(), np.uint8), replicated)

    def _init(self, key: jax.Array) -> State:
        params_key, data_key = jax.random.split(key)
        params = self.model.init(params_key)
        return {
            "params": params,
            "opt": self.optimizer.init(params),
            "step": jnp.zeros((), jnp.int32),
            "key": data_key,
        }

    def _place(self, path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, spec_of(name_of(path)))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def _step(self, state: State, text: jax.Array) -> tuple[State, jax.Array]:
        # The batch depends only on the saved key and step. So a resumed run gets the same data, without a data
        # iterator whose position would have to be saved.
        batch_key = jax.random.fold_in(state["key"], state["step"])
        starts = jax.random.randint(batch_key, (BATCH, 1), 0, text.size - self.model.context - 1)
        tokens = text[starts + jnp.arange(self.model.context + 1)].astype(jnp.int32)
        tokens = jax.lax.with_sharding_constraint(tokens, NamedSharding(self.mesh, P("data")))

        loss, gradients = jax.value_and_grad(self._loss)(state["params"], tokens)
        updates, opt = self.optimizer.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {**state, "params": params, "opt": opt, "step": state["step"] + 1}, loss

    def _loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        # Gather each weight over "data" before its use, as FSDP does. Otherwise XLA might move the activations.
        def gather(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            spec = P(*(None if axis == "data" else axis for axis in spec_of(name_of(path))))
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec))

        logits = self.model.logits(jax.tree.map_with_path(gather, params), tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def run(self, state: State, until: int) -> tuple[State, dict[int, float]]:
        """Train up to a step. Returns the state, and the loss of each step."""
        first = int(state["step"])
        losses: dict[int, float] = {}
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
            task = progress.add_task("training", total=until, completed=first, loss="compiling")
            for step in range(first, until):
                state, loss = self.step(state, self.corpus)
                losses[step] = float(loss)
                progress.update(task, advance=1, loss=f"loss {losses[step]:.4f}")
        return state, losses


def digest(tree: Any) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of all leaves. It does not depend on the mesh."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        sha.update(f"{name_of(path)} {array.dtype} {array.shape}\n".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


# The phases, each in its own process -------------------------------------------------------------------------


def train(directory: Path, mesh_name: str) -> dict[str, Any]:
    model = Model()
    trainer = Trainer(model, make_mesh(mesh_name))
    state, before = trainer.run(trainer.init(jax.random.key(SEED)), SAVE_AT)
    report = {"saved": digest(state), "params": digest(state["params"]), "pieces": pieces(state)}

    info = jaxckpt.save(
        directory / "checkpoint",
        state,
        metadata={"model": asdict(model), "corpus": hashlib.sha256(corpus()).hexdigest()},
        overwrite=True,  # --directory may hold the checkpoint of an earlier run
        options=jaxckpt.Options(progress=True),
    )
    console.print(
        f"  saved step {SAVE_AT}: {len(jax.tree.leaves(state))} leaves, {info.total_bytes / 1e6:.2f} MB "
        f"in {info.objects} objects, {info.seconds:.2f} s"
    )

    state, after = trainer.run(state, STEPS)
    return report | {"losses": before | after, "final": digest(state)}


def resume(directory: Path, mesh_name: str) -> dict[str, Any]:
    checkpoint = jaxckpt.open(directory / "checkpoint")
    if checkpoint.metadata["corpus"] != hashlib.sha256(corpus()).hexdigest():
        raise SystemExit("the model was trained on the standard library of another Python version")
    trainer = Trainer(Model(**checkpoint.metadata["model"]), make_mesh(mesh_name))

    # The target gives the tree, the shapes and the shardings to restore. `restore(path, mesh=mesh)` is enough for
    # dicts and lists. With a target, the result has Optax's state classes, and a wrong shape is an error.
    plan = checkpoint.plan(trainer.target)
    started = time.perf_counter()
    state = jaxckpt.restore(directory / "checkpoint", trainer.target, options=jaxckpt.Options(progress=True))
    jax.block_until_ready(state)
    seconds = time.perf_counter() - started
    console.print(
        f"  restored step {state['step']}: {plan.needed_bytes / 1e6:.2f} MB needed, "
        f"{plan.read_bytes / 1e6:.2f} MB read in {plan.requests} requests, {seconds:.2f} s"
    )

    report = {"restored": digest(state), "pieces": pieces(state)}
    state, losses = trainer.run(state, STEPS)
    return report | {"losses": losses, "final": digest(state)}


def serve(directory: Path) -> dict[str, Any]:
    model = Model(**jaxckpt.open(directory / "checkpoint").metadata["model"])
    started = time.perf_counter()
    params = jaxckpt.load_numpy(directory / "checkpoint", select="params")["params"]
    seconds = time.perf_counter() - started
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    console.print(f"  loaded {size / 1e6:.2f} MB of parameters as NumPy arrays, {seconds:.2f} s")
    text = generate(model, params, prompt="import os\n\ndef ", length=40 if QUICK else 600)
    console.print(Panel(Text(text), title="text generated by the model"))
    return {"params": digest(params), "devices": len(jax.devices())}


def generate(model: Model, params: Params, prompt: str, length: int, temperature: float = 0.6) -> str:
    """The prompt, followed by bytes sampled with a fixed seed."""
    start, context = len(prompt), model.context
    stop = start + length
    text = jnp.zeros(max(stop, context), jnp.int32).at[:start].set(np.frombuffer(prompt.encode(), np.uint8))

    @jax.jit
    def write(params: Params, text: jax.Array) -> jax.Array:
        def write_byte(at: jax.Array, text: jax.Array) -> jax.Array:
            # The window ends before `at`. While the text is shorter than the context, the window also contains the
            # zeros that follow the text. They have no effect, because attention is causal.
            begin = jnp.maximum(at - context, 0)
            window = jax.lax.dynamic_slice(text, (begin,), (context,))
            logits = model.logits(params, window[None])[0, at - begin - 1]
            key = jax.random.fold_in(jax.random.key(SEED), at)
            return text.at[at].set(jax.random.categorical(key, logits / temperature))

        return jax.lax.fori_loop(start, stop, write_byte, text)

    return bytes(np.asarray(write(params, text)[:stop], np.uint8)).decode("ascii", "replace")


def pieces(state: State) -> dict[str, str]:
    """The shape of one device's piece of each leaf, such as "48x96"."""
    return {
        name_of(path): "x".join(map(str, leaf.sharding.shard_shape(leaf.shape))) or "scalar"
        for path, leaf in jax.tree.leaves_with_path(state)
    }


# The demonstration: run the phases, compare their reports ---------------------------------------------------


def run_phase(phase: str, directory: Path, mesh_name: str) -> dict[str, Any]:
    """Run one phase in its own process, because a process cannot change its number of JAX devices."""
    on = "1 device, no mesh" if phase == "serve" else f"{device_count(mesh_name)} devices, mesh {mesh_name}"
    console.print()
    console.rule(f"[bold]{phase}[/] on {on}", align="left")
    started = time.perf_counter()
    command = [sys.executable, __file__, "--phase", phase, "--mesh", mesh_name, "--directory", str(directory)]
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        raise SystemExit(f"phase {phase} on {on} failed with exit status {status}")
    console.print(f"  [dim]process took {time.perf_counter() - started:.1f} s[/]")
    return json.loads((directory / f"{phase}-{mesh_name}.json").read_text())


def device_count(mesh_name: str) -> int:
    data, model = map(int, mesh_name.split("x"))
    return data * model


def demonstrate(directory: Path) -> bool:
    started = time.perf_counter()
    reference = run_phase("train", directory, TRAIN_MESH)
    resumed = {mesh: run_phase("resume", directory, mesh) for mesh in RESUME_MESHES}
    served = run_phase("serve", directory, "1x1")

    console.print()
    console.rule("[bold]results", align="left")
    console.print(layout_table(jaxckpt.open(directory / "checkpoint"), reference, resumed))
    console.print(loss_table(reference, resumed))

    checks = [
        (served["devices"] == 1, "serve: the process has only one device"),
        (served["params"] == reference["params"], "serve: the parameters equal the saved ones, bit for bit"),
    ]
    for mesh, report in resumed.items():
        restored = report["restored"] == reference["saved"]
        checks.append((restored, f"mesh {mesh}: the restored state equals the saved state, bit for bit"))
        steps = map(str, range(SAVE_AT, STEPS))
        gaps = np.array([abs(report["losses"][step] - reference["losses"][step]) for step in steps])
        if mesh == TRAIN_MESH:
            final = report["final"] == reference["final"]
            checks += [
                (bool((gaps == 0).all()), f"mesh {mesh}: all {len(gaps)} losses equal the reference, bit for bit"),
                (final, f"mesh {mesh}: the final state equals the reference, bit for bit"),
            ]
        else:
            largest = f"at most {gaps.max():.0e} ({LOSS_TOLERANCE:.0e} allowed)"
            close = bool((gaps <= LOSS_TOLERANCE).all())
            checks.append((close, f"mesh {mesh}: all {len(gaps)} losses differ from the reference by {largest}"))

    for passed, check in checks:
        console.print(f"  [green]passed[/]  {check}" if passed else f"  [bold red]FAILED[/]  {check}")
    n_passed = sum(passed for passed, _ in checks)
    console.print(f"\n{n_passed} of {len(checks)} checks passed, {time.perf_counter() - started:.0f} s")
    return n_passed == len(checks)


def layout_table(
    checkpoint: jaxckpt.Checkpoint, reference: dict[str, Any], resumed: dict[str, dict[str, Any]]
) -> Table:
    """The layout of some leaves on each mesh. The other leaves have similar layouts."""
    others = [mesh for mesh in resumed if mesh != TRAIN_MESH]
    table = Table("leaf", "PartitionSpec", f"{TRAIN_MESH} (saved)", *others, box=box.SIMPLE_HEAD)
    table.title, table.title_justify = "shape of one device's piece of each leaf, by mesh", "left"
    shown = ("params/embed", "params/blocks/0/", "params/head", "opt/1/0/mu/blocks/0/up", "step", "key")
    for name, leaf in checkpoint.leaves.items():
        if name.startswith(shown):
            spec = ", ".join(axis or "-" for axis in leaf.spec) or "replicated"
            cells = (report["pieces"][name] for report in (reference, *(resumed[mesh] for mesh in others)))
            table.add_row(name, spec, *cells)
    return table


def loss_table(reference: dict[str, Any], resumed: dict[str, dict[str, Any]]) -> Table:
    """Losses of some steps. The checks compare all steps after the save."""
    table = Table("step", "reference", *(f"resumed on {mesh}" for mesh in resumed), box=box.SIMPLE_HEAD)
    table.title, table.title_justify = "loss, nats per byte", "left"
    shown = (0, SAVE_AT // 2, SAVE_AT - 1, SAVE_AT, SAVE_AT + 1, (SAVE_AT + STEPS) // 2, STEPS - 1)
    for step in map(str, shown):
        others = (report["losses"].get(step) for report in resumed.values())
        cells = ("" if loss is None else f"{loss:.7f}" for loss in others)
        table.add_row(step, f"{reference['losses'][step]:.7f}", *cells, end_section=step == str(SAVE_AT - 1))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Train on one mesh, resume on three, serve without a mesh.")
    parser.add_argument("--directory", type=Path, help="write the checkpoint and reports here, and keep them")
    parser.add_argument("--phase", choices=("train", "resume", "serve"), help="run one phase, in this process")
    parser.add_argument("--mesh", default=TRAIN_MESH, help="mesh of the phase, data x model (default: %(default)s)")
    arguments = parser.parse_args()

    if arguments.phase is None:
        if arguments.directory is not None:
            return 0 if demonstrate(arguments.directory) else 1
        with tempfile.TemporaryDirectory(prefix="jaxckpt-demo-") as directory:
            return 0 if demonstrate(Path(directory)) else 1
    if arguments.directory is None:
        parser.error("--phase needs the --directory that holds the checkpoint")

    # JAX reads both when it first looks for devices, not when it is imported.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={device_count(arguments.mesh)}"
    jax.config.update("jax_platforms", "cpu")
    arguments.directory.mkdir(parents=True, exist_ok=True)
    if arguments.phase == "train":
        report = train(arguments.directory, arguments.mesh)
    elif arguments.phase == "resume":
        report = resume(arguments.directory, arguments.mesh)
    else:
        report = serve(arguments.directory)
    (arguments.directory / f"{arguments.phase}-{arguments.mesh}.json").write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
