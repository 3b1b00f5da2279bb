"""Many real processes under jax.distributed: who writes what, who reads what, and what happens when one fails."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from processes import Finished, RunProcesses, RunPython, free_port, run_together

import jaxckpt

# A tree with replicated, partly replicated and sharded leaves on 8 devices, and leaves of the host.
TREE = """
import jax.numpy as jnp, numpy as np, jaxckpt, os
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def value(name, shape):
    return np.random.default_rng(sum(map(ord, name))).standard_normal(shape).astype(np.float32)

SHAPES = {
    "replicated": ((512, 256), P()),
    "embed": ((640, 96), P()),
    "rows": ((512, 512), P("data")),
    "columns": ((512, 512), P(None, "model")),
    "both": ((512, 512), P("data", "model")),
    "together": ((1024, 64), P(("data", "model"))),
    **{f"bias{i}": ((384,), P()) for i in range(20)},
    **{f"norm{i}": ((256,), P("model")) for i in range(20)},
}

def make(mesh):
    def one(name, shape, spec):
        whole = value(name, shape)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index: whole[index])
    tree = {name: one(name, shape, spec) for name, (shape, spec) in SHAPES.items()}
    return tree | {"host": value("host", (33,)), "step": 7, "count": jnp.int32(3), "key": jax.random.key(5)}

def check(tree):
    for name, (shape, _) in SHAPES.items():
        whole = value(name, shape)
        for shard in tree[name].addressable_shards:
            assert np.array_equal(shard.data, whole[shard.index]), name
    assert np.array_equal(tree["host"], value("host", (33,)))
    assert tree["step"] == 7 and tree["count"] == 3
    assert np.array_equal(jax.random.key_data(tree["key"]), jax.random.key_data(jax.random.key(5)))

def mesh_of(*sizes, devices=None):
    return Mesh(np.array(devices or jax.devices()).reshape(sizes), ("data", "model"))
"""


def printed(done: Finished) -> dict[str, object]:
    """The JSON object that a process printed last."""
    return json.loads(done.stdout.splitlines()[-1])


def test_four_save_two_restore_one_reads(run_processes: RunProcesses, run_python: RunPython, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    saved = run_processes(
        TREE
        + """
import json
info = jaxckpt.save(args, make(mesh_of(2, 4)))
print(json.dumps({"total": info.total_bytes, "each": info.process_bytes, "sha256": info.manifest_sha256}))
""",
        processes=4,
        devices_per_process=2,
        args=path,
    )
    assert len({done.stdout.splitlines()[-1] for done in saved}) == 1
    info = printed(saved[0])
    each = info["each"]
    assert info["sha256"] == hashlib.sha256(Path(path, "manifest.json").read_bytes()).hexdigest()
    assert isinstance(each, list)
    unique = sum(leaf.nbytes for leaf in jaxckpt.open(path).leaves.values())
    assert info["total"] == sum(each) == unique, "every byte is written once"
    assert max(each) <= 1.05 * sum(each) / 4, "the busiest process writes at most 5 % more than the mean"
    on_disk = sum(file.stat().st_size for file in Path(path).rglob("c/**/*") if file.is_file())
    assert unique <= on_disk <= 1.01 * unique

    counted = run_processes(
        TREE
        + """
import json, os
preadv, counts = os.preadv, []
os.preadv = lambda *arguments: counts.append(preadv(*arguments)) or counts[-1]
mesh = mesh_of(2, 2)
tree = jaxckpt.restore(args, mesh=mesh)
read = sum(counts)
check(tree)
assert tree["both"].sharding == NamedSharding(mesh, P("data", "model"))
plan = jaxckpt.open(args).plan(mesh=mesh).processes[process_id].cost
print(json.dumps({"read": read, "planned": plan.read_bytes, "needed": plan.needed_bytes}))
""",
        processes=2,
        devices_per_process=2,
        args=path,
    )
    for done in counted:
        figures = printed(done)
        assert figures["read"] == figures["planned"], "each chunk that a process needs is read once, and no other"

    run_python(
        TREE.replace("import jax.numpy", "import jax, jax.numpy")
        + f"""
from jax._src import xla_bridge
tree = jaxckpt.load_numpy({path!r})
assert not xla_bridge._backends, "load_numpy must not start a backend"
for name, (shape, _) in SHAPES.items():
    assert np.array_equal(tree[name], value(name, shape)), name
""",
        devices=1,
    )


STATE = """
import jax, jax.numpy as jnp, numpy as np, optax, jaxckpt, sys
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def state():
    random = np.random.default_rng(0)
    params = {
        "embed": random.standard_normal((448, 112)).astype(np.float32),
        "layers": [{"w": random.standard_normal((112, 448)).astype("bfloat16"), "b": np.arange(448.0, dtype=np.float32)}
                   for _ in range(3)],
    }
    params = jax.tree.map(jnp.asarray, params)
    return {"params": params, "opt": optax.adam(1e-3).init(params), "step": jnp.int32(12)}

def spec(path, leaf):
    return P("data", "model") if leaf.ndim == 2 else P("model") if leaf.ndim == 1 else P()
"""


def test_sixty_four_devices_to_fifty_six_and_to_one(run_python: RunPython, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    run_python(
        STATE
        + f"""
mesh = Mesh(np.array(jax.devices()).reshape(8, 8), ("data", "model"))
tree = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec("", leaf))), state())
info = jaxckpt.save({path!r}, tree)
assert len(jax.devices()) == 64
""",
        devices=64,
    )
    for devices, shape in ((56, (7, 8)), (1, (1, 1))):
        run_python(
            STATE
            + f"""
mesh = Mesh(np.array(jax.devices()).reshape{shape}, ("data", "model"))
target = jax.eval_shape(state)
tree = jaxckpt.restore({path!r}, target, mesh=mesh)
assert jax.tree.structure(tree) == jax.tree.structure(target)
for got, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(state()), strict=True):
    assert got.sharding == NamedSharding(mesh, jax.tree.leaves(got.sharding.spec) and got.sharding.spec or P())
    assert len(got.sharding.device_set) == {devices}
    assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
    if got.ndim == 2:
        assert got.sharding.spec == P("data", "model")
""",
            devices=devices,
        )


def test_a_storage_mesh_of_the_first_process_has_it_write_all(run_processes: RunProcesses, tmp_path: Path) -> None:
    done = run_processes(
        TREE
        + """
import json
everyone, first = mesh_of(2, 4), mesh_of(2, 2, devices=jax.devices()[:4])
tree = make(everyone)
info = jaxckpt.save(args, tree, mesh=first, specs=lambda path, leaf: P("data") if leaf.ndim == 2 else P())
restored = jaxckpt.restore(args, mesh=everyone)
check(restored)
assert restored["both"].sharding == NamedSharding(everyone, P("data"))
print(json.dumps({"total": info.total_bytes, "each": info.process_bytes}))
""",
        processes=2,
        devices_per_process=4,
        args=str(tmp_path / "ckpt"),
    )
    for process in done:
        info = printed(process)
        assert info["each"] == [info["total"], 0]


def test_a_path_that_is_not_shared_is_found_before_data_is_written(run_processes: RunProcesses, tmp_path: Path) -> None:
    run_processes(
        TREE
        + """
os.mkdir(f"{args}/of-process-{process_id}")
os.chdir(f"{args}/of-process-{process_id}")
try:
    jaxckpt.save("ckpt", make(mesh_of(2, 2)))
except jaxckpt.PathNotSharedError as error:
    assert "process 1 does not see" in str(error)
else:
    raise SystemExit("saved")
""",
        processes=2,
        devices_per_process=2,
        args=str(tmp_path),
    )
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_one_processs_failure_is_raised_by_all_and_the_next_save_works(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    done = run_processes(
        TREE
        + """
import errno
from jaxckpt._storage.files import FileWriter
mesh, path = mesh_of(2, 2), args + "/ckpt"
jaxckpt.save(path, make(mesh))
options = jaxckpt.Options(timeout_seconds=20)

def attempt(tree, **more):
    try:
        jaxckpt.save(path, tree, overwrite=True, options=options)
    except jaxckpt.JaxckptError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise SystemExit("saved")
    check(jaxckpt.restore(path))

spoilt = make(mesh)
if process_id == 1:
    spoilt["both"].delete()
attempt(spoilt)

other = make(mesh)
if process_id == 1:
    other["host"] = other["host"][:3]
attempt(other)

write = FileWriter.write
def refuse(*_):
    raise jaxckpt.StorageError(errno.ENOSPC, "no space left on device")
if process_id == 1:
    FileWriter.write = refuse
attempt(make(mesh))
FileWriter.write = write
jaxckpt.save(path, make(mesh), overwrite=True)
check(jaxckpt.restore(path))
assert len([name for name in os.listdir(path) if name.startswith("data-")]) == 1
""",
        processes=2,
        devices_per_process=2,
        args=str(tmp_path),
    )
    for number, process in enumerate(done):
        lines = [line for line in process.stdout.splitlines() if "Error:" in line]
        kinds = [line.split(":")[0] for line in lines]
        own = ["TreeError", "PeersDisagreeError", "StorageError"]
        assert kinds == (own if number == 1 else ["PeerFailedError", "PeersDisagreeError", "PeerFailedError"])
        assert number == 1 or all("process 1" in lines[i] for i in (0, 2))
        assert number == 1 or "no space left" in lines[2]
        assert "process 1 was given a tree of other leaves" in lines[1]


def test_all_raise_when_one_cannot_restore_and_the_next_restore_works(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    done = run_processes(
        TREE
        + """
from jaxckpt._storage.files import FileReader
path, options = args + "/ckpt", jaxckpt.Options(timeout_seconds=20)
jaxckpt.save(path, make(mesh_of(2, 2)))

def attempt(call):
    try:
        call()
    except jaxckpt.JaxckptError as error:
        print(f"raised {type(error).__name__}: {error}")

read = FileReader.read
if process_id == 1:
    def fail(*_):
        raise jaxckpt.DataError("this disk is bad")
    FileReader.read = fail
attempt(lambda: jaxckpt.restore(path, options=options))
FileReader.read = read
attempt(lambda: jaxckpt.save(path, make(mesh_of(2, 2)), options=options))
attempt(lambda: jaxckpt.restore(args + "/nothing", options=options))
attempt(lambda: jaxckpt.restore(path if process_id else args + "/nothing", options=options))
check(jaxckpt.restore(path))
print("raised nothing at last")
""",
        processes=2,
        devices_per_process=2,
        args=str(tmp_path),
        timeout=60,
    )
    raised = [[line for line in process.stdout.splitlines() if line.startswith("raised")] for process in done]
    kinds = [[line.split()[1].rstrip(":") for line in lines] for lines in raised]
    assert kinds[0] == "PeerFailedError CheckpointExistsError NotACheckpointError NotACheckpointError nothing".split()
    assert kinds[1] == "DataError PeerFailedError NotACheckpointError PeerFailedError nothing".split()
    assert re.search(r"process 1 failed with DataError: cannot read leaf '.*: this disk is bad", raised[0][0])
    assert "process 0 failed with CheckpointExistsError" in raised[1][1]
    assert "process 0 failed with NotACheckpointError" in raised[1][3]


def test_a_leaf_on_one_processs_devices_alone(run_processes: RunProcesses, tmp_path: Path) -> None:
    done = run_processes(
        TREE
        + """
import json
second, everyone = mesh_of(1, 2, devices=jax.devices()[2:]), mesh_of(2, 2)
whole = value("alone", (256, 256))
tree = {
    "alone": jax.make_array_from_callback(
        whole.shape, NamedSharding(second, P(None, "model")), lambda index: whole[index], dtype=whole.dtype
    ),
    "rows": make(everyone)["rows"],
}
info = jaxckpt.save(args, tree)
for restored in (jaxckpt.restore(args), jaxckpt.restore(args, mesh=everyone)):
    assert restored["alone"].shape == whole.shape
    assert restored["rows"].sharding == tree["rows"].sharding
    for shard in restored["alone"].addressable_shards:
        assert np.array_equal(shard.data, whole[shard.index])
assert len(restored["alone"].addressable_shards) == 2
print(json.dumps({"each": info.process_bytes}))
""",
        processes=2,
        devices_per_process=2,
        args=str(tmp_path / "ckpt"),
        timeout=60,
    )
    rows, alone = 512 * 512 * 4, 256 * 256 * 4
    assert all(printed(process)["each"] == [rows // 2, rows // 2 + alone] for process in done)


def test_one_that_fails_while_leaves_are_exchanged_does_not_hold_up_the_others(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    done = run_processes(
        TREE
        + """
import errno, time
from jaxckpt._storage.files import FileWriter
tree, first = make(mesh_of(2, 2)), mesh_of(1, 2, devices=jax.devices()[:2])

def refuse(*_):
    raise jaxckpt.StorageError(errno.ENOSPC, "no space left on device")

if process_id == 0:
    FileWriter.write = refuse
try:
    jaxckpt.save(args, tree, mesh=first, specs=P(), options=jaxckpt.Options(timeout_seconds=5))
except jaxckpt.JaxckptError as error:
    print("raised", type(error).__name__, error, flush=True)
if process_id == 0:
    time.sleep(7)  # JAX's service lives here, and ends the others with it
os._exit(0)
""",
        processes=2,
        devices_per_process=2,
        args=str(tmp_path / "ckpt"),
        timeout=60,
        check=False,
    )
    assert "raised StorageError" in done[0].stdout, str(done[0])
    assert "raised PeerFailedError process 0 failed with StorageError" in done[1].stdout, str(done[1])


def test_a_missed_call_never_mixes_two_steps(run_processes: RunProcesses, tmp_path: Path) -> None:
    done = run_processes(
        TREE
        + """
import time
mesh = mesh_of(2, 2)

def save(step):
    data = np.full((64, 64), step, np.float32)
    tree = {
        "w": jax.make_array_from_callback(data.shape, NamedSharding(mesh, P("data")), lambda index: data[index]),
        "count": jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda _: np.int32(step)),
        "step": step,
    }
    options = jaxckpt.Options(timeout_seconds=2)
    try:
        jaxckpt.save(args, tree, metadata={"step": step}, overwrite=True, options=options)
    except jaxckpt.PeerError as error:
        print(step, type(error).__name__, flush=True)

if process_id == 0:
    for step in (1, 2, 3):
        save(step)
    time.sleep(3)
else:
    time.sleep(3.5)  # it does not call save at step 1
    for step in (2, 3):
        save(step)
os._exit(0)
""",
        processes=2,
        devices_per_process=2,
        args=str(tmp_path / "ckpt"),
        timeout=60,
        check=False,
    )
    assert "1 PeerTimeoutError" in done[0].stdout, str(done[0])
    if (tmp_path / "ckpt" / "manifest.json").exists():
        tree = jaxckpt.load_numpy(tmp_path / "ckpt")
        assert len({float(value) for value in tree["w"].ravel()}) == 1, "rows of two steps in one checkpoint"


def test_a_bad_argument_in_one_process_leaves_the_calls_in_step(run_processes: RunProcesses, tmp_path: Path) -> None:
    done = run_processes(
        TREE
        + """
import time
tree = make(mesh_of(2, 2))
for attempt in range(2):
    path = "" if (process_id, attempt) == (1, 0) else args
    try:
        jaxckpt.save(path, tree, overwrite=True, options=jaxckpt.Options(timeout_seconds=4))
        print(attempt, "saved", flush=True)
    except jaxckpt.JaxckptError as error:
        print(attempt, type(error).__name__, flush=True)
time.sleep(5 * (process_id == 0))
os._exit(0)
""",
        processes=2,
        devices_per_process=2,
        args=str(tmp_path / "ckpt"),
        timeout=60,
        check=False,
    )
    lines = [[line for line in process.stdout.splitlines() if line[:2] in ("0 ", "1 ")] for process in done]
    assert lines == [["0 PeerFailedError", "1 saved"], ["0 InputError", "1 saved"]]


# Processes out of step -------------------------------------------------------------------------------------


OUT_OF_STEP = (
    TREE
    + """
import time
mesh = mesh_of(2, 2)
options = jaxckpt.Options(timeout_seconds=10)

def attempt(call):
    try:
        call()
        print("fine", flush=True)
    except (jaxckpt.JaxckptError, TypeError) as error:
        print(f"{type(error).__name__}: {error}".replace(chr(10), " "), flush=True)

def rows(step):
    data = np.full((8, 8), step, np.float32)
    return jax.make_array_from_callback(data.shape, NamedSharding(mesh, P("data")), lambda index: data[index])
"""
)


def out_of_step(run_processes: RunProcesses, program: str, args: str) -> list[list[str]]:
    done = run_processes(OUT_OF_STEP + program, processes=2, devices_per_process=2, args=args, timeout=60)
    return [process.stdout.splitlines() for process in done]


@pytest.mark.parametrize(("name", "value"), [("step", "step"), ("name", "f'step {step}'")])
def test_python_values_show_that_a_call_was_missed(
    run_processes: RunProcesses, tmp_path: Path, name: str, value: str
) -> None:
    """Process 1 skips step 1, and would save its shards of step 2 along with process 0's of step 1."""
    program = f"""
for step in range(4):
    if (process_id, step) == (1, 1) or (process_id, step) == (0, 3):
        continue
    tree = {{"w": rows(step), {name!r}: {value}}}
    attempt(lambda: jaxckpt.save(args, tree, overwrite=True, options=options))
"""
    for number, lines in enumerate(out_of_step(run_processes, program, str(tmp_path / "c"))):
        assert lines[0] == "fine"
        assert lines[1].startswith("PeersDisagreeError: the processes hold different values"), lines
        assert f"{name!r} (" in lines[1]
        assert "missed a call" in lines[1]
        assert number == 1 or "process 1 and process 0 differ" in lines[1]
    assert jaxckpt.verify(tmp_path / "c").ok
    tree = jaxckpt.load_numpy(tmp_path / "c")
    assert len(np.unique(tree["w"])) == 1


def test_different_calls_are_named(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
path = args + "/c"
attempt(lambda: jaxckpt.save(path, {"w": rows(0)}, options=options))
if process_id == 0:
    attempt(lambda: jaxckpt.restore(path, options=options))
else:
    attempt(lambda: jaxckpt.save(path, {"w": rows(1)}, overwrite=True, options=options))
with jaxckpt.Checkpointer(args + "/steps", options=options) as steps:
    attempt(lambda: steps.save(3 + process_id, {"w": rows(3)}) and steps.wait())
    attempt(lambda: steps.save(5, {"w": rows(5)}) and steps.wait())
"""
    for lines in out_of_step(run_processes, program, str(tmp_path)):
        assert lines[0] == "fine"
        assert re.search(
            r"PeersDisagreeError: the processes made different calls of jaxckpt\. process 0: restore", lines[1]
        )
        assert re.search(r"process 1: save '.*/c', for the 2nd time", lines[1])
        assert re.search(r"process 0: Checkpointer.save '.*/00000003'.*; process 1: .*/00000004'", lines[2])
        assert lines[3] == "fine"


@pytest.mark.parametrize(
    ("what", "argument", "blamed"),
    [
        ("options", "options=jaxckpt.Options(timeout_seconds=10, chunk_bytes=(1 + process_id) << 6)", "other Options"),
        ("metadata", "options=options, metadata={'run': process_id}", "other metadata"),
        ("names", "options=options, process_state={f'at{process_id}': 1}", "a process_state of other names"),
        (
            "specs",
            "options=options, mesh=mesh, specs=P('data', 'model') if process_id else P('data')",
            "leaves of other shardings",
        ),
    ],
)
def test_what_differs_is_what_is_blamed(
    run_processes: RunProcesses, tmp_path: Path, what: str, argument: str, blamed: str
) -> None:
    program = f"""
attempt(lambda: jaxckpt.save(args, {{"w": rows(0)}}, {argument}))
attempt(lambda: jaxckpt.save(args, {{"w": rows(0)}}, options=options))
"""
    for lines in out_of_step(run_processes, program, str(tmp_path / "c")):
        assert lines[0].startswith(f"PeersDisagreeError: process 1 was given {blamed}"), lines
        assert lines[1] == "fine"


def test_what_one_process_raises_by_itself_leaves_the_calls_in_step(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    program = """
with jaxckpt.Checkpointer(args, options=options) as steps:
    bad = {"metrics": {"loss": "low"}} if process_id == 1 else {"metrics": {"loss": 0.5}}
    attempt(lambda: steps.save(0, {"w": rows(0)}, **bad) and steps.wait())
    attempt(lambda: steps.save(1, {"w": rows(1)}, metrics={"loss": 0.5}) and steps.wait())
    attempt(lambda: steps.save(2, {"w": rows(2)}, metadata={1: 2} if process_id else None) and steps.wait())
    attempt(lambda: steps.save(2, {"w": rows(2)}, metrics={"loss": 0.5}) and steps.wait())
    attempt(lambda: steps.restore(7 if process_id else 1))
    attempt(lambda: steps.restore(2))
    attempt(lambda: steps.process_state("data" if process_id else 3))
    print(steps.steps(), steps.metrics(1))
"""
    lines = out_of_step(run_processes, program, str(tmp_path))
    assert [line.split(":")[0] for line in lines[1]][:7] == [
        "InputError", "fine", "InputError", "fine", "NotACheckpointError", "fine", "InputError",
    ]  # fmt: skip
    assert [line.split(":")[0] for line in lines[0]][1::2][:3] == ["fine"] * 3
    assert all(each[-1] == "[1, 2] {'loss': 0.5}" for each in lines)


def test_calls_before_the_processes_are_connected_and_a_second_job(
    run_python: RunPython, run_processes: RunProcesses, tmp_path: Path
) -> None:
    """JAX is connected a second time, by one process that has saved before and another that has just begun."""
    program = """
import subprocess, sys, os
import numpy as np, jaxckpt, jax

def connect(address, number):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, number, initialization_timeout=60)

folder, address, role = sys.argv[1:]
options = jaxckpt.Options(timeout_seconds=10)
if role == "old":
    for n in range(3):
        jaxckpt.save(f"{folder}/alone", {"x": n}, overwrite=True)
connect(address, int(role == "old"))
for n in range(2):
    jaxckpt.save(f"{folder}/both", {"x": np.arange(n)}, overwrite=True, options=options)
print("done")
"""
    address = f"127.0.0.1:{free_port()}"
    file = tmp_path / "program.py"
    file.write_text(program)
    run_together([[str(file), str(tmp_path), address, role] for role in ("old", "new")], timeout=60)
    np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "both")["x"], np.arange(1))


def test_a_replicated_count_on_the_devices_of_one_process(run_processes: RunProcesses, tmp_path: Path) -> None:
    """Such as the step count of a pipeline stage."""
    program = """
second = mesh_of(1, 2, devices=jax.devices()[2:])
def count(value, mesh):
    return jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda _: np.int32(value), dtype=np.int32)
tree = {"stage": count(7, second), "all": count(3, mesh)}
attempt(lambda: jaxckpt.save(args, tree, options=options))
attempt(lambda: jaxckpt.save(args, {"stage": count(7, second), "all": count(process_id, mesh)}, overwrite=True))
"""
    for lines in out_of_step(run_processes, program, str(tmp_path / "c")):
        assert lines[0] == "fine"
        assert lines[1].startswith("PeersDisagreeError: the processes hold different values")
        assert "'all' (0 in process 0): process 1 and process 0 differ" in lines[1]
    assert jaxckpt.load_numpy(tmp_path / "c") == {"stage": 7, "all": 3}


def test_what_else_may_not_differ(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
for name, (zero, one) in {
    "containers": ({"x": [1, 2]}, {"x": (1, 2)}),
    "empty": ({"x": 1}, {"x": 1, "y": {}}),
    "keys": ({"x": {1: 1}}, {"x": {"1": 1}}),
    "long": ({"x": "a" * 9000}, {"x": "b" * 9000}),
}.items():
    attempt(lambda: jaxckpt.save(f"{args}/{name}", one if process_id else zero, options=options))
attempt(lambda: jaxckpt.save(args + "/order", {"x": 1}, metadata={"b": 1, "a": 2} if process_id else {"a": 2, "b": 1}))
"""
    for lines in out_of_step(run_processes, program, str(tmp_path)):
        assert [line.partition(":")[0] for line in lines] == ["PeersDisagreeError"] * 4 + ["fine"], lines
        assert "'x' (checksum" in lines[3]


def test_a_process_that_stages_for_long_is_not_silent(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
from jaxckpt._save import save
stage = save.stage
def late(*arguments, **named):
    time.sleep(7 * (process_id == 0))  # as for a leaf that is still being computed
    yield from stage(*arguments, **named)
save.stage = late
options = jaxckpt.Options(timeout_seconds=2)
attempt(lambda: jaxckpt.save(args, {"w": rows(0)}, options=options))
"""
    for lines in out_of_step(run_processes, program, str(tmp_path / "c")):
        assert lines == ["fine"]


def test_an_exchange_once_the_main_thread_has_ended(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
import threading
def last():
    threading.main_thread().join()
    tree = {"w": rows(0)}
    attempt(lambda: jaxckpt.save_async(args, tree, mesh=mesh, specs=P(None, "data"), options=options))
jax.block_until_ready(rows(0))
threading.Thread(target=last).start()
"""
    for lines in out_of_step(run_processes, program, str(tmp_path / "c")):
        assert lines == ["fine"]
    assert jaxckpt.load_numpy(tmp_path / "c")["w"].shape == (8, 8)


def test_ctrl_c_while_another_process_has_not_come(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
import os, signal, threading
if process_id == 0:
    threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
else:
    time.sleep(8)
begun = time.monotonic()
try:
    jaxckpt.save(args, {"w": rows(0)}, options=options)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - begun < 5)
except jaxckpt.PeerFailedError as error:
    print("KeyboardInterrupt" in str(error))
attempt(lambda: jaxckpt.save(args, {"w": rows(0)}, options=options))
"""
    lines = out_of_step(run_processes, program, str(tmp_path / "c"))
    assert lines == [["interrupted True", "fine"], ["True", "fine"]]
