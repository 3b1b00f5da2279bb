"""Exports of a running job: a Hugging Face folder from arrays on the devices of several processes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import PROGRAMS, RunProcesses, RunPython, environment, free_port, start

import jaxckpt
from jaxckpt._formats import safetensors
from jaxckpt._formats.export import FolderFile, FolderPlan
from jaxckpt.rules import Rule, Rules

DATA = Path(__file__).parents[1] / "data" / "transformers" / "llama"
PROCESSES = 4
_REST = [Rule(source=name, target=name) for name in ("v", "tied", "n")]


class Job:
    """The exports of one job, made once. No test changes them."""

    def __init__(self, folder: Path, run_processes: RunProcesses) -> None:
        self.out = folder / "out"
        self.out.mkdir()
        given = {"model": str(DATA), "out": str(self.out)}
        program = PROGRAMS / "live_export.py"
        done = run_processes(program, processes=PROCESSES, devices_per_process=2, args=given, timeout=200)
        self.processes: list[dict[str, Any]] = [json.loads(one.stdout) for one in done]

    def outcomes(self, what: str) -> set[str]:
        return {str(process["outcomes"][what]) for process in self.processes}


_jobs: list[Job] = []


@pytest.fixture
def job(tmp_path_factory: pytest.TempPathFactory, run_processes: RunProcesses) -> Job:
    if not _jobs:
        _jobs.append(Job(tmp_path_factory.mktemp("job"), run_processes))
    return _jobs[0]


@pytest.mark.parametrize(
    "name", ["plain", "laid-out", "scanned", "direct", "direct-scanned", "stored", "after", "step-2", "step-4"]
)
def test_the_folder_has_the_bits_of_the_model(job: Job, name: str) -> None:
    delta = jaxckpt.diff(job.out / name, DATA)
    assert delta.identical, (delta, job.processes[0]["outcomes"])
    index = json.loads((job.out / name / "model.safetensors.index.json").read_text())
    assert sorted({*index["weight_map"].values(), "model.safetensors.index.json"}) == sorted(os.listdir(job.out / name))


def test_specs_that_split_the_rows_of_tensors_need_no_temporary_checkpoint(job: Job) -> None:
    assert job.outcomes("stacks on the way") != {"0"}
    assert job.outcomes("stacks on the way of rows") == {"0"}


def test_each_file_has_one_owner_and_every_process_owns_some(job: Job) -> None:
    written = [process["written"]["plain"] for process in job.processes]
    files = [name for own in written for name in own]
    assert len(files) == len({*files}) == len([*(job.out / "plain").glob("*.safetensors")])
    assert all(written), written


def test_transformers_loads_it(job: Job, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers loads the export")
    import torch

    shutil.copytree(job.out / "plain", tmp_path / "model")
    shutil.copy(DATA / "config.json", tmp_path / "model")
    expected = np.load(DATA / "expected.npz")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        found = model(torch.tensor(expected["tokens"])).logits.numpy()
    np.testing.assert_allclose(found, expected["logits"], rtol=1e-5, atol=1e-6)


def test_errors_reach_all_processes_and_leave_nothing(job: Job) -> None:
    assert job.outcomes("plain") == {f"{job.out}/plain"}
    assert job.outcomes("replaced") == {f"{job.out}/plain"}
    for what, expected in {
        "exists": "already exists; pass overwrite=True to replace it",
        "wrong rules": "the rules do not fit",
        "metadata": "takes no metadata= or process_state=",
        "no space": "no space left",
        "no export": "export= takes a jaxckpt.formats.Export",
    }.items():
        assert all(expected in outcome for outcome in job.outcomes(what)), job.outcomes(what)
    assert sorted(os.listdir(job.out)) == [
        *("after", "direct", "direct-scanned", "laid-out", "plain", "run", "scanned", "step-2", "step-4", "stored"),
    ]


def test_a_checkpointer_exports_the_steps_that_it_saves(job: Job) -> None:
    assert [job.outcomes(f"step {step}") for step in (1, 2, 3, 4)] == [{"False"}, {"True"}, {"False"}, {"True"}]
    assert jaxckpt.Run(job.out / "run").steps() == [2, 4]
    assert jaxckpt.load_numpy(job.out / "run@4", select="step") == {"step": 4}


def test_files_are_divided_by_their_bytes() -> None:
    sizes = {"a": 5, "b": 5, "c": 5, "d": 4, "e": 1}
    plan = FolderPlan([FolderFile(name, size, lambda path: None) for name, size in sizes.items()], lambda path: None)
    assert [[file.name for file in plan.of_process(process, 3)] for process in range(3)] == [
        ["a", "d"],
        ["b", "e"],
        ["c"],
    ]


def test_one_process_exports_casts_and_keeps_special_leaves_out(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(6.0), "n": 3}
    info = jaxckpt.save(tmp_path / "hf", tree, format="safetensors", dtype={"w": jnp.bfloat16, "n": None})
    assert info.path == str(tmp_path / "hf")
    found = jaxckpt.load_numpy(tmp_path / "hf")
    assert (found["w"].dtype, found["n"]) == (jnp.bfloat16, 3)
    with pytest.raises(jaxckpt.errors.TreeError, match="cannot store 1 of these leaves"):
        jaxckpt.save(tmp_path / "other", {"w": "text"}, format="safetensors")
    jaxckpt.save(tmp_path / "compressed", tree, format="safetensors", options=jaxckpt.Options(compression="zstd"))
    assert jaxckpt.load_numpy(tmp_path / "compressed")["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert sorted(os.listdir(tmp_path)) == ["compressed", "hf"]


RULES = {
    "none": None,
    "prefix": {"": "model"},
    "transposed": Rules([Rule(source="w{i}", target="t/{i}", layout="a b c -> (c b) a"), *_REST]),
    "cast": Rules([Rule(source="w{i}", target="t/{i}", dtype="bfloat16", scale=2, offset=1), *_REST]),
    "joined": Rules([Rule(source=("w0", "w1", "w2"), target="w", axis=1), *_REST]),
    "split": Rules([Rule(source="w{i}", target=("a{i}", "b{i}"), axis=2, parts=(3, 5)), *_REST]),
    "stacked": Rules([Rule(source="w{i}", target="w", layout="a b c -> b i (c a)"), *_REST]),
    "unstacked": Rules([Rule(source="w{i}", target="w/{i}/{b}", layout="a b c -> c a"), *_REST]),
    "padded": Rules(
        [Rule(source="w{i}", target="w/{i}", layout="a b c -> c b a", sizes={"b": 6}, resized={"b": 9}), *_REST]
    ),
    "truncated": Rules(
        [Rule(source="w{i}", target="w/{i}", layout="a b c -> c b a", sizes={"b": 6}, resized={"b": 4}), *_REST]
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_live_export_is_what_convert_makes_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    random = np.random.default_rng(0)
    specs = P("x", None, "y"), P(None, "x"), P(("y", "x"))
    tree: dict[str, Any] = {
        f"w{i}": jax.device_put(random.normal(size=(4, 6, 8)).astype(np.float32), NamedSharding(mesh, spec))
        for i, spec in enumerate(specs)
    }
    tree |= {"v": jax.device_put(jnp.arange(64, dtype=jnp.bfloat16), NamedSharding(mesh, P("y"))), "n": np.int64(7)}
    tree["tied"] = tree["v"]
    jaxckpt.save(tmp_path / "checkpoint", tree)
    jaxckpt.convert(tmp_path / "checkpoint", tmp_path / "converted", format="safetensors", rename=RULES[name])
    options = jaxckpt.Options(object_bytes=1 << 16, chunk_bytes=256, host_bytes=1 << 20)
    jaxckpt.save(tmp_path / "live", tree, format="safetensors", rename=RULES[name], options=options)
    assert jaxckpt.diff(tmp_path / "converted", tmp_path / "live").identical
    (file,) = (tmp_path / "live").glob("*.safetensors")
    assert file.read_bytes() == (tmp_path / "converted" / file.name).read_bytes()


def bytes_passed_to_the_system() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts in /proc")
def test_each_byte_is_written_once(tmp_path: Path) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), P(None, "x"))
    tree = {f"w{i}": jax.device_put(np.full((1024, 1024), i, np.float32), sharding) for i in range(4)}
    rules = Rules([Rule(source="w{i}", target="{i}", layout="a b -> b a")])
    before = bytes_passed_to_the_system()
    jaxckpt.save(tmp_path / "hf", tree, format="safetensors", rename=rules)
    assert bytes_passed_to_the_system() - before < 1.01 * 4 * 4 * 1024**2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "npz"}, "format='npz' cannot be saved directly; expected one of jaxckpt, safetensors"),
        ({"format": "huggingface"}, "cannot be saved directly"),
        ({"rename": {"a": "b"}}, r"save\(rename=…\) needs format="),
        ({"format": "safetensors", "path": "memory://bucket/x"}, "an export needs a local path"),
        ({"format": "safetensors", "path": "x.safetensors"}, "an export is a folder"),
    ],
)
def test_invalid_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(jaxckpt.errors.InputError, match=message):
        jaxckpt.save(**{"path": "folder", "tree": {"a": 1}, **arguments})
    assert not any(tmp_path.iterdir())


def test_training_may_donate_while_the_export_is_written(tmp_path: Path) -> None:
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    tree = {"w": jnp.zeros((256, 256))}
    pending = jaxckpt.save_async(tmp_path / "hf", tree, format="safetensors")
    for _ in range(3):
        tree = update(tree)
    pending.wait()
    assert not jaxckpt.load_numpy(tmp_path / "hf")["w"].any()


def test_the_last_step_of_a_preempted_job_is_not_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    export = jaxckpt.formats.Export(tmp_path / "hf")
    with jaxckpt.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)})
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(jaxckpt.Preempted):
            checkpoints.save(3, {"w": jnp.ones(3)}, export=export)
    assert jaxckpt.Run(tmp_path / "run").steps() == [1, 3]
    assert "so step 3 is not exported" in caplog.text
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_local_tier_exports_nothing(tmp_path: Path) -> None:
    tier = jaxckpt.LocalTier(tmp_path / "local", copies=0)
    with (
        jaxckpt.Checkpointer(tmp_path / "run", local=tier, on_preemption="ignore") as checkpoints,
        pytest.raises(jaxckpt.errors.InputError, match="in a Checkpointer without local="),
    ):
        checkpoints.save(1, {"w": 1}, export=jaxckpt.formats.Export(tmp_path / "hf"))


def test_the_next_export_deletes_what_a_killed_one_left(run_python: RunPython, tmp_path: Path) -> None:
    program = """
        import os, sys, jaxckpt, jax.numpy as jnp
        from jaxckpt._formats import safetensors
        safetensors.write_tensors = lambda *_, **__: os._exit(9)
        jaxckpt.save({path!r}, {{"w": jnp.ones(3)}}, format="safetensors")
    """
    run_python(program.format(path=str(tmp_path / "hf")), devices=1, check=False)
    assert len(os.listdir(tmp_path)) == 1, "a temporary checkpoint with a draft"
    jaxckpt.save(tmp_path / "hf", {"w": jnp.zeros(3)}, format="safetensors")
    assert os.listdir(tmp_path) == ["hf"]
    assert jaxckpt.load_numpy(tmp_path / "hf")["w"].tolist() == [0, 0, 0]


@pytest.mark.child
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_exports_leave_a_complete_folder_or_none(
    tmp_path: Path, request: pytest.FixtureRequest, processes: int
) -> None:
    if not request.config.getoption("--campaign"):
        pytest.skip("the campaign kills exports")
    transformers = pytest.importorskip("transformers", reason="transformers loads the export")
    original, chance = jaxckpt.load_numpy(DATA), random.Random(processes)
    out, log, copy = tmp_path / "folder/hf", tmp_path / "log", tmp_path / "copy"
    outcomes, last = Counter[str](), 0
    for number_of_kill in range(30):
        run_bytes = 1 << 30 * (number_of_kill % 2)  # direct writes, or none of tensors that both processes hold
        given = {"model": str(DATA), "out": str(out), "first": last + 1, "run_bytes": run_bytes, "shard_bytes": 9000}
        address = f"127.0.0.1:{free_port()}"
        with log.open("wb") as stdout:
            children = [
                start(
                    [str(PROGRAMS / "exports_forever.py"), str(number), str(processes), address, json.dumps(given)],
                    environment(2),
                    stdout if number == 0 else None,
                    number=number,
                )
                for number in range(processes)
            ]
        while not log.read_text() and all(child.poll() is None for child in children):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.5))
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
        for child in children:
            child.wait()
        last = int(log.read_text().split()[-1])
        if not out.exists():
            outcomes["none"] += 1
            continue
        shutil.copytree(out, copy)
        shutil.copy(DATA / "config.json", copy)
        model = transformers.LlamaForCausalLM.from_pretrained(copy)
        shutil.rmtree(copy)
        found = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name in original}
        version = round(float(np.median(found["model.norm.weight"] / original["model.norm.weight"])))
        for name, tensor in original.items():
            assert found[name].tobytes() == (tensor.astype(np.float32) * np.float32(version)).tobytes(), name
        assert version in (last, last + 1)
        outcomes["old" if version == last else "new"] += 1
        last = version
        print(outcomes, os.listdir(out.parent), flush=True)
    assert outcomes.total() == 30


def test_the_shards_are_as_large_as_those_of_transformers() -> None:
    assert safetensors.SHARD_BYTES == 5_000_000_000


@pytest.mark.child
def test_two_jobs_that_export_to_one_path(tmp_path: Path) -> None:
    """One of them wins each time."""
    program = """
import sys, numpy as np, jaxckpt
path, value = sys.argv[1], int(sys.argv[2])
for _ in range(60):
    tree = {f"w{n}": np.full((50, 30), value + n, np.float32) for n in range(4)}
    try:
        jaxckpt.save(path, tree, format="safetensors", overwrite=True)
    except jaxckpt.errors.JaxckptError:
        pass
"""
    run = [sys.executable, "-c", program, str(tmp_path / "hf")]
    jobs = [subprocess.Popen([*run, value], env=environment(1)) for value in ("0", "200")]
    assert [job.wait(120) for job in jobs] == [0, 0]
    found = jaxckpt.load_numpy(tmp_path / "hf")
    assert {float(found[f"w{n}"].max()) - n for n in range(4)} in ({0.0}, {200.0})
    assert os.listdir(tmp_path) == ["hf"]


def test_a_symbolic_link_is_not_replaced(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "hf", {"w": jnp.ones(3)}, format="safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "hf")
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="is a symbolic link to"):
        jaxckpt.save(tmp_path / "link", {"w": jnp.zeros(3)}, format="safetensors", overwrite=True)
    assert (tmp_path / "link").is_symlink()


def test_a_leaf_that_the_format_cannot_store_is_left_out_by_a_rule(tmp_path: Path) -> None:
    tree = {"w": jnp.ones(2), "name": "x"}
    with pytest.raises(jaxckpt.errors.TreeError, match="leave them out") as raised:
        jaxckpt.save(tmp_path / "hf", tree, format="safetensors")
    assert "rename=Rules([], drop=[…], keep=True) leaves leaves out" in raised.value.__notes__[0]
    jaxckpt.save(tmp_path / "hf", tree, format="safetensors", rename=Rules([], drop=["name"], keep=True))
    assert [*jaxckpt.load_numpy(tmp_path / "hf")] == ["w"]
