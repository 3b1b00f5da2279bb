"""jaxckpt's arrays under Orbax's CheckpointManager: the manager itself, saving in the background."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import RunProcesses

import jaxckpt
import jaxckpt.orbax
from jaxckpt._errors import InputError, MismatchError, NotACheckpointError, StorageError
from jaxckpt._folder import Folder

pytestmark = pytest.mark.filterwarnings("ignore::Warning:orbax", "ignore::Warning:etils")


def mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("data", "model"))


MODEL = nn.Dense(24)
APPLY = MODEL.apply
OPTIMIZER = optax.adamw(1e-3)


def train_state(step: int = 0) -> TrainState:
    params = MODEL.init(jax.random.key(step), jnp.ones((1, 8)))
    state = TrainState.create(apply_fn=APPLY, params=params, tx=OPTIMIZER)
    kernels = NamedSharding(mesh(2, 4), P("data", "model"))
    whole = NamedSharding(mesh(2, 4), P())
    return jax.tree.map(lambda leaf: jax.device_put(leaf, kernels if jnp.ndim(leaf) == 2 else whole), state)


def abstract(state: Any, over: Mesh) -> Any:
    def leaf(array: jax.Array) -> jax.ShapeDtypeStruct:
        spec = P("model", "data") if array.ndim == 2 else P()
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(over, spec))

    return jax.tree.map(leaf, state)


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def manager(path: Path, **options: Any) -> ocp.CheckpointManager:
    found = ocp.CheckpointManagerOptions(enable_async_checkpointing=True, **options)
    return ocp.CheckpointManager(path, options=found, handler_registry=jaxckpt.orbax.handler_registry())


STYLES: dict[str, tuple[Any, Any]] = {
    "standard": (ocp.args.StandardSave, ocp.args.StandardRestore),
    "pytree": (ocp.args.PyTreeSave, ocp.args.PyTreeRestore),
    "restore_args": (
        ocp.args.PyTreeSave,
        lambda item: ocp.args.PyTreeRestore(item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)),
    ),
    "ours": (jaxckpt.orbax.Save, jaxckpt.orbax.Restore),
}


@pytest.mark.parametrize("style", STYLES)
def test_a_training_state_under_a_manager(tmp_path: Path, style: str) -> None:
    save, restore = STYLES[style]
    with manager(tmp_path / "run", max_to_keep=2) as found:
        for step in range(4):
            assert found.save(step, args=save(train_state(step)))
        found.wait_until_finished()
        assert found.all_steps() == [2, 3]
        assert found.latest_step() == 3
    with manager(tmp_path / "run") as found:
        assert found.latest_step() == 3
        over = mesh(4, 2)
        restored = found.restore(3, args=restore(abstract(train_state(), over)))
        assert_same(restored, train_state(3))
        assert restored.params["params"]["kernel"].sharding == NamedSharding(over, P("model", "data"))
        assert_same(found.restore(2, args=restore(abstract(train_state(), mesh(3, 1)))), train_state(2))
    assert (tmp_path / "run/3/default/manifest.json").is_file()
    assert not list(tmp_path.rglob("*.orbax-checkpoint-tmp"))
    assert jaxckpt.verify(tmp_path / "run/3/default").ok
    with pytest.raises(NotACheckpointError, match="3/default is an item that jaxckpt has written: open it"):
        jaxckpt.open(tmp_path / "run/3")


def test_items_metrics_and_the_best_are_kept(tmp_path: Path) -> None:
    with manager(tmp_path / "run", max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min") as found:
        for step, loss in enumerate([3.0, 1.0, 2.0, 5.0]):
            items = ocp.args.Composite(
                params=ocp.args.StandardSave({"w": jnp.full((8, 4), step)}),
                moments=ocp.args.PyTreeSave([jnp.full((4,), -step), step]),
                config=ocp.args.JsonSave({"step": step}),
            )
            found.save(step, args=items, metrics={"loss": loss})
        found.wait_until_finished()
        assert found.all_steps() == [1, 2]
        assert found.best_step() == 1
        restored = found.restore(1)
        assert_same(restored["params"], {"w": jnp.full((8, 4), 1)})
        assert_same(restored["moments"], [jnp.full((4,), -1), 1])
        assert restored["config"] == {"step": 1}
        assert found.metrics(1) == {"loss": 1.0}
        assert found.item_metadata(1)["params"] == {"w": jax.ShapeDtypeStruct((8, 4), jnp.int32)}


def test_by_item_handlers_as_maxtext_has_them(tmp_path: Path) -> None:
    def made() -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(create=True, save_interval_steps=2, enable_async_checkpointing=True)
        handlers = {"items": jaxckpt.orbax.Handler(jaxckpt.Options(chunk_bytes=1 << 20))}
        return ocp.CheckpointManager(tmp_path / "run", item_names=("items",), item_handlers=handlers, options=options)

    with made() as found:
        for step in range(4):
            args = ocp.args.Composite(items=jaxckpt.orbax.Save(train_state(step), custom_metadata={"by": "me"}))
            assert found.save(step, args=args) == (step % 2 == 0)
    with made() as found:
        assert found.all_steps() == [0, 2]
        wanted = abstract(train_state(), mesh(4, 2))
        restored = found.restore(2, args=ocp.args.Composite(items=jaxckpt.orbax.Restore(wanted)))
        assert_same(restored["items"], train_state(2))
    assert jaxckpt.open(tmp_path / "run/2/items").metadata == {"by": "me"}


def test_steps_that_orbax_wrote_are_restored_and_new_ones_added(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as theirs:
        theirs.save(1, args=ocp.args.StandardSave(train_state(1)))
    with manager(tmp_path / "run") as found:
        args = ocp.args.StandardRestore(abstract(train_state(), mesh(4, 2)))
        assert_same(found.restore(1, args=args), train_state(1))
        found.save(2, args=ocp.args.StandardSave(train_state(2)))
        assert_same(found.restore(2, args=args), train_state(2))
        assert found.all_steps() == [1, 2]


def test_arrays_may_be_donated_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    publish = Folder.publish

    def held(*args: Any, **options: Any) -> None:
        assert gate.wait(60)
        publish(*args, **options)

    monkeypatch.setattr(Folder, "publish", held)
    state = {"w": jnp.arange(32.0).reshape(8, 4), "host": np.arange(3)}
    with manager(tmp_path / "run") as found:
        found.save(0, args=ocp.args.StandardSave(state))  # returns, though nothing can be published
        assert found.is_saving_in_progress()
        assert not (tmp_path / "run/0").exists()
        state["w"] = jax.jit(lambda x: x + 1, donate_argnums=0)(state["w"])
        state["host"] += 1
        gate.set()
        found.wait_until_finished()
        assert_same(found.restore(0), {"w": jnp.arange(32.0).reshape(8, 4), "host": np.arange(3)})


def test_a_save_that_fails_is_told_and_leaves_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **options: Any) -> None:
        raise StorageError(28, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "publish", refused)
        found = manager(tmp_path / "run")
        found.save(0, args=ocp.args.StandardSave({"w": jnp.ones(4)}))
        with pytest.raises(StorageError, match="no space left"):
            found.wait_until_finished()
    found.save(1, args=ocp.args.StandardSave({"w": jnp.ones(4)}))
    found.wait_until_finished()
    assert found.all_steps(read=True) == [1]
    found.close()


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with manager(tmp_path / "run") as found:
        found.save(0, args=ocp.args.StandardSave({"w": jnp.ones(4), "b": jnp.ones(2)}))
        wrong = {"w": jax.ShapeDtypeStruct((5,), jnp.float32), "b": jax.ShapeDtypeStruct((2,), jnp.float32)}
        with pytest.raises(MismatchError, match=r"'w'.*\(4,\)"):
            found.restore(0, args=ocp.args.StandardRestore(wrong))
        with pytest.raises(InputError, match="transforms"):
            found.restore(0, args=ocp.args.PyTreeRestore(wrong, transforms={}))
        some = ocp.args.PyTreeRestore({"w": jax.ShapeDtypeStruct((4,), jnp.float32)}, partial_restore=True)
        assert_same(found.restore(0, args=some), {"w": jnp.ones(4)})


def test_restore_args_tell_sharding_type_and_dtype(tmp_path: Path) -> None:
    over = mesh(4, 2)
    with manager(tmp_path / "run") as found:
        found.save(0, args=ocp.args.PyTreeSave({"w": jnp.ones((8, 4)), "v": jnp.ones(4), "n": 3}))
        restore_args = {
            "w": ocp.ArrayRestoreArgs(mesh=over, mesh_axes=P("data")),
            "v": ocp.ArrayRestoreArgs(sharding=NamedSharding(over, P("model"))),
            "n": ocp.RestoreArgs(restore_type=int),
        }
        restored = found.restore(0, args=ocp.args.PyTreeRestore(restore_args=restore_args))
        assert restored["w"].sharding == NamedSharding(over, P("data"))
        assert restored["v"].sharding == NamedSharding(over, P("model"))
        assert restored["n"] == 3
        item = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32), "v": jnp.zeros(4), "n": 0}
        restore_args["w"] = ocp.RestoreArgs(restore_type=np.ndarray)
        restored = found.restore(0, args=ocp.args.PyTreeRestore(item, restore_args=restore_args))
        assert isinstance(restored["w"], np.ndarray)
        restore_args["w"] = ocp.ArrayRestoreArgs(dtype=jnp.float64)
        with jax.enable_x64(True):
            assert found.restore(0, args=ocp.args.PyTreeRestore(restore_args=restore_args))["w"].dtype == jnp.float64


def test_without_a_manager(tmp_path: Path) -> None:
    handler = ocp.CompositeCheckpointHandler(handler_registry=jaxckpt.orbax.handler_registry())
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "x", args=ocp.args.Composite(a=jaxckpt.orbax.Save({"w": np.ones(3)})))
        assert_same(checkpointer.restore(tmp_path / "x")["a"], {"w": np.ones(3)})


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import orbax.checkpoint as ocp
import jaxckpt.orbax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def make(over, spec, step):
    sharding = NamedSharding(over, spec)
    whole = np.arange(64.0, dtype=np.float32).reshape(8, 8) + step
    return {"w": jax.make_array_from_callback((8, 8), sharding, lambda index: whole[index]), "step": step}

grid = np.array(jax.devices())
mesh = Mesh(grid.reshape(2, 2), ("data", "model"))
options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
manager = ocp.CheckpointManager(args, options=options, handler_registry=jaxckpt.orbax.handler_registry())
for step in range(4):
    manager.save(step, args=ocp.args.StandardSave(make(mesh, P("data", "model"), step)))
manager.wait_until_finished()
assert manager.latest_step() == 3, manager.all_steps()
other = NamedSharding(Mesh(grid.reshape(4, 1), ("data", "model")), P(None, "data"))
target = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=other), "step": 0}
restored = manager.restore(2, args=ocp.args.StandardRestore(target))
for shard in restored["w"].addressable_shards:
    wanted = (np.arange(64.0, dtype=np.float32).reshape(8, 8) + 2)[shard.index]
    assert np.asarray(shard.data).tobytes() == wanted.tobytes()
print(restored["step"], restored["w"].sharding == other, len(manager.all_steps()))
manager.close()
"""


def test_in_two_processes(run_processes: RunProcesses, tmp_path: Path) -> None:
    done = run_processes(PROGRAM, processes=2, devices_per_process=2, args=str(tmp_path / "run"))
    assert [one.stdout.splitlines()[-1] for one in done] == ["2 True 2"] * 2
    assert jaxckpt.verify(tmp_path / "run/3/default").ok
    assert jaxckpt.load_numpy(tmp_path / "run/3/default")["w"][7, 7] == 66


def test_a_step_of_our_items_is_opened_by_item(tmp_path: Path) -> None:
    registry = jaxckpt.orbax.handler_registry()
    with ocp.CheckpointManager(tmp_path / "run", handler_registry=registry) as manager:
        manager.save(
            3, args=ocp.args.Composite(state=ocp.args.StandardSave({"w": jnp.ones(4)}), x=ocp.args.JsonSave({"a": 1}))
        )
        manager.wait_until_finished()
    with pytest.raises(jaxckpt.NotACheckpointError, match=r"run/3/state is an item that jaxckpt has written: open it"):
        jaxckpt.open(tmp_path / "run")
    assert jaxckpt.load_numpy(tmp_path / "run/3/state")["w"].tolist() == [1] * 4


SEVERAL_ITEMS = """
import jax, jax.numpy as jnp, numpy as np
import orbax.checkpoint as ocp
import jaxckpt.orbax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))

def made(number):
    whole = np.arange(64.0, dtype=np.float32) + number
    return {"w": jax.make_array_from_callback((64,), sharding, lambda index: whole[index]), "number": number}

def run(folder, names, **others):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    with ocp.CheckpointManager(folder, options=options, handler_registry=jaxckpt.orbax.handler_registry()) as manager:
        for step in range(12):
            items = {name: ocp.args.StandardSave(made(10 * step + n)) for n, name in enumerate(names)}
            manager.save(step, args=ocp.args.Composite(**items, **others))
        manager.wait_until_finished()
        found = manager.restore(11)
        for n, name in enumerate(names):
            assert found[name]["number"] == 110 + n, (name, found[name])
            for shard in found[name]["w"].addressable_shards:
                assert (shard.data == np.arange(64.0)[shard.index] + 110 + n).all()
        print(manager.all_steps(), found.get("config"))

run(f"{args}/two", ("params", "opt"))
run(f"{args}/three", ("params", "opt", "ema"), config=ocp.args.JsonSave({"a": 1}))
"""


def test_several_items_a_step_in_two_processes(run_processes: RunProcesses, tmp_path: Path) -> None:
    done = run_processes(SEVERAL_ITEMS, processes=2, devices_per_process=2, args=str(tmp_path))
    assert [one.stdout.splitlines()[-2:] for one in done] == [["[10, 11] None", "[10, 11] {'a': 1}"]] * 2
