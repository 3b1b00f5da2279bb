"""Helpers for tests of the command line: a folder of checkpoints, and calls of jaxckpt in this or another process."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import processes
from click.testing import CliRunner, Result
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt._cli.main import main
from jaxckpt._model import manifest as manifests
from jaxckpt._options import Options
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store_path import store_at

SAVED = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


def fill(folder: Path) -> None:
    """Make a run of three steps, with the remains of killed jobs and files of other libraries."""
    with contextlib.chdir(folder):
        with jaxckpt.Checkpointer("run1", keep_last_of={"opt_state": 1}, background=False) as steps:
            for step in (100, 200, 300):
                steps.save(step, state(step), metrics={"loss": 1 / step, "accuracy": 0.5 + step / 1000, "bad": np.nan})
        for step in (100, 200, 300):
            backdate(f"run1/{step:08d}")
        jaxckpt.convert("run1/00000300", "run1/exported.safetensors", select="params")
        Path("run1/00000400", f"data-{'0' * 32}").mkdir(parents=True)
        Path("run1/00000500").mkdir()
        Path("run1/00000500/manifest.json").write_text("{}")
        Path("run1/logs").mkdir()
        Path("empty").mkdir()
        jaxckpt.save("small", {"w": np.array([1.0, np.nan]), "z": np.complex64(1 + 2j), "b": b"\x00", "i": 1 << 80})
        jaxckpt.save("other", {"w": np.array([1.5, np.nan]), "z": np.complex64(1 + 2j), "b": b"\x00", "new": 1})


def backdate(path: str) -> None:
    """Set the time of a checkpoint to long ago, so that its age always has the same width."""
    store = store_at(path, Options())
    manifest, content = load_manifest(store)
    dated = manifests.msgspec.structs.replace(manifest, created=SAVED.isoformat())
    store.republish(manifest.data_folder, manifests.encode(dated), content, sync=False)


def state(step: int) -> Any:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def put(value: Any, *spec: str | None) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    layers = [
        {"bias": put(jnp.full(8, n, jnp.bfloat16), "model"), "kernel": put(jnp.ones((8, 8)) * n, "data", "model")}
        for n in range(12)
    ]
    embedding = put(jnp.arange(1024, dtype=jnp.float32).reshape(64, 16), "model")
    return {
        "data": np.arange(10),
        "opt_state": {"mu": put(jnp.full((64, 16), float(step)), "model")},
        "params": {
            "a_module_of_a_rather_long_name_for_normalisation": put(jnp.ones(8)),
            "layers": layers,
            "wte": embedding,
        },
        "rng": jax.random.key(7),
        "step": step,
        "text": "x" * 100,
    }


def runner(width: object = None) -> CliRunner:
    """A runner that keeps stderr apart, for terminals of this width."""
    separate = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}  # click 8.1
    return CliRunner(env={"COLUMNS": None if width is None else str(width)}, **separate)


def run(*args: str, width: int | None = None, code: int = 0, stdin: str | None = None) -> Result:
    result = runner(width).invoke(main, args, input=stdin, prog_name="jaxckpt")
    assert result.exit_code == code, f"{args}: {result.exit_code}\n{result.output}"
    return result


def run_json(*args: str, code: int = 0) -> Any:
    return json.loads(run(*args, "--json", code=code).stdout)


def command(*args: str, **settings: Any) -> subprocess.Popen[str]:
    """A real process, in which no JAX backend can start."""
    env = {**processes.environment(1), "JAX_PLATFORMS": "absent"}
    return subprocess.Popen([sys.executable, "-m", "jaxckpt", *args], env=env, text=True, **settings)


def days() -> str:
    return f"{(datetime.datetime.now(datetime.UTC) - SAVED).days} d"
