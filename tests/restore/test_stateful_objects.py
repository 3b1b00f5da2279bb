"""Stateful leaves: saved as part of the tree, and loaded back into the object or created again."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from processes import PASSED, PROGRAMS, RunProcesses

import jaxckpt
from jaxckpt._arguments import pytree


class Loader:
    """An object with the interface of torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.epoch = 0
        self.order = np.arange(5)
        self.seen: list[Any] = []
        self.note: dict[str, Any] = {"name": "train", "parts": [1, (2, None)], "empty": {}}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "order": self.order, "seen": self.seen, "note": self.note}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.order, self.seen, self.note = (state[key] for key in ("epoch", "order", "seen", "note"))


def used() -> Loader:
    loader = Loader()
    loader.epoch, loader.order, loader.seen = 3, np.arange(5)[::-1].copy(), [1, "two", 3.5, None, b"5", 1 << 90]
    return loader


def equal(one: Loader, other: Loader) -> bool:
    states = [{**loader.state_dict(), "order": list(loader.order)} for loader in (one, other)]
    return states[0] == states[1]


class Color(enum.IntEnum):
    RED = 1
    BLUE = 2


class Money:
    """A leaf that can only be stored if its type is registered."""

    def __init__(self, cents: int) -> None:
        self.cents = cents


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Restores the registry after each test."""
    types = dict(pytree._TYPES)
    yield
    pytree._TYPES.clear()
    pytree._TYPES.update(types)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    jaxckpt.save(tmp_path / "ckpt", {"w": jnp.ones(4), "data": used(), "step": 7})
    return tmp_path / "ckpt"


# Objects with state methods --------------------------------------------------------------------------------


def test_an_object_keeps_its_identity_and_gets_the_saved_state(path: Path) -> None:
    loader = Loader()
    restored = jaxckpt.restore(path, {"w": jnp.zeros(4), "data": loader, "step": 0})
    assert restored["data"] is loader
    assert equal(loader, used())
    assert type(loader.note["parts"][1]) is tuple
    assert restored["step"] == 7
    assert float(restored["w"][0]) == 1


def test_without_the_object_its_state_is_part_of_the_tree(path: Path) -> None:
    for tree in (jaxckpt.restore(path), jaxckpt.load_numpy(path)):
        assert tree["data"]["epoch"] == 3
        assert tree["data"]["seen"][5] == 1 << 90
        fresh = Loader()
        fresh.load_state_dict(tree["data"])
        assert equal(fresh, used())
    checkpoint = jaxckpt.open(path)
    assert [*checkpoint][:2] == ["data/epoch", "data/note/name"]
    assert checkpoint["data/order"][1:3].tolist() == [3, 2]
    assert checkpoint.tree()["data"]["epoch"].value == 3
    assert jaxckpt.verify(path).ok


def test_a_state_that_was_saved_as_a_plain_tree_is_loaded_into_an_object(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ckpt", {"data": used().state_dict()})
    loader = Loader()
    jaxckpt.restore(tmp_path / "ckpt", {"data": loader})
    assert equal(loader, used())


@pytest.mark.parametrize("state", [None, {}, b"\x00grain", 5, "text", [1, [2]], (np.ones(3), 2), {3: {"a": 1}}])
def test_a_state_of_any_form_comes_back(tmp_path: Path, state: Any) -> None:
    class Box:
        def get_state(self) -> Any:
            return state

        def set_state(self, given: Any) -> None:
            self.given = given

    for number, tree in enumerate([lambda box: box, lambda box: {"a": [box]}, lambda box: (1, box)]):
        jaxckpt.save(tmp_path / str(number), tree(Box()))
        box = Box()
        jaxckpt.restore(tmp_path / str(number), tree(box))
        assert repr(box.given) == repr(state)
        assert type(box.given) is type(state)
        assert jaxckpt.diff(tmp_path / str(number), tmp_path / str(number)).identical


def test_the_objects_of_other_libraries(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="it is not a dependency, and lacks CPU builds for some Python versions")
    grain = pytest.importorskip("grain", reason="machines that run only the tests of one device may lack it")

    def batches() -> Any:
        return iter(grain.MapDataset.range(100).seed(1).shuffle().repeat().batch(4).to_iter_dataset())

    def schedule() -> tuple[Any, Any]:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([weight], lr=0.5)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    jaxckpt.register_leaf(torch.Tensor, to_state=lambda one: one.numpy(), from_state=torch.from_numpy)
    data, random, (optimizer, scheduler) = batches(), np.random.RandomState(3), schedule()
    sampler = torch.Generator()
    sampler.manual_seed(5)
    for _ in range(3):
        next(data)
        random.standard_normal()
        torch.rand(1, generator=sampler)
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
        optimizer.step()
        scheduler.step()
    objects = {"data": data, "random": random, "sampler": sampler, "optimizer": optimizer, "schedule": scheduler}
    jaxckpt.save(tmp_path / "ckpt", objects)
    optimizer, scheduler = schedule()
    fresh = {
        "data": batches(),
        "random": np.random.RandomState(4),
        "sampler": torch.Generator(),
        "optimizer": optimizer,
        "schedule": scheduler,
    }
    restored = jaxckpt.restore(tmp_path / "ckpt", fresh)
    assert all(restored[name] is fresh[name] for name in fresh)
    assert next(data).tolist() == next(fresh["data"]).tolist()
    assert random.standard_normal() == fresh["random"].standard_normal()
    assert torch.equal(torch.rand(3, generator=sampler), torch.rand(3, generator=fresh["sampler"]))
    old, new = (one.state_dict() for one in (objects["optimizer"], optimizer))
    assert all(torch.equal(old["state"][0][name], new["state"][0][name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert old["param_groups"] == new["param_groups"]
    assert objects["schedule"].state_dict() == scheduler.state_dict()


def test_changes_after_save_async_returns_are_not_saved(tmp_path: Path) -> None:
    loader = used()
    pending = jaxckpt.save_async(tmp_path / "ckpt", {"data": loader, "big": jnp.ones(1 << 20)})
    loader.epoch = 99
    loader.order[:] = 77
    loader.seen.append("late")
    loader.note["name"] = "late"
    pending.wait()
    fresh = Loader()
    jaxckpt.restore(tmp_path / "ckpt", {"data": fresh}, strict=False)
    assert equal(fresh, used())


def test_a_checkpointer_resumes_an_object(tmp_path: Path) -> None:
    loader = Loader()
    with jaxckpt.Checkpointer(tmp_path / "run", keep_last_of={"data": 1}) as steps:
        for step in range(3):
            loader.epoch = step
            steps.save(step, {"w": jnp.full(4, float(step)), "data": loader})
    fresh = Loader()
    with jaxckpt.Checkpointer(tmp_path / "run", keep_last_of={"data": 1}) as steps:
        last, state = steps.restore_or_init(lambda: {"w": jnp.zeros(4), "data": fresh})
    assert last == 2
    assert state["data"] is fresh
    assert fresh.epoch == 2
    assert "data/order" not in jaxckpt.open(tmp_path / "run" / "00000001"), "the component was dropped"


# All changes or none ----------------------------------------------------------------------------------------


def test_a_restore_that_fails_changes_no_object(path: Path) -> None:
    loader = Loader()
    with pytest.raises(jaxckpt.MismatchError, match="has shape"):
        jaxckpt.restore(path, {"w": jnp.zeros(5), "data": loader, "step": 0})
    assert equal(loader, Loader())
    (stored,) = [one for one in (path / f"data-{jaxckpt.open(path).save_id}").rglob("c/**/*") if one.is_file()][:1]
    for one in path.rglob("c/**/*"):
        if one.is_file():
            content = bytearray(one.read_bytes())
            content[0] ^= 1
            one.write_bytes(content)
    assert stored
    with pytest.raises(jaxckpt.CorruptError):
        jaxckpt.restore(path, {"w": jnp.zeros(4), "data": loader, "step": 0})
    assert equal(loader, Loader())


def test_an_error_of_an_object_names_the_leaf(path: Path) -> None:
    class Loader:
        def state_dict(self) -> Any:
            raise RuntimeError("no workers")

        def load_state_dict(self, state: Any) -> None:
            raise KeyError("epochs")

    with pytest.raises(KeyError) as caught:
        jaxckpt.restore(path, {"w": jnp.zeros(4), "data": Loader(), "step": 0})
    assert "'data'" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="no workers") as failed:
        jaxckpt.save(path, {"a": [Loader()]}, overwrite=True)
    assert "'a/0'" in failed.value.__notes__[0]


def test_a_state_that_cannot_be_stored_is_an_error_that_names_the_leaf(tmp_path: Path) -> None:
    loader = Loader()
    loader.note = {"when": datetime.date(2026, 1, 1)}
    with pytest.raises(jaxckpt.errors.TreeError, match=r"'data/note/when' is of type datetime.date.*register_leaf"):
        jaxckpt.save(tmp_path / "ckpt", {"data": loader})
    loader.note = {"self": loader}
    with pytest.raises(jaxckpt.errors.TreeError, match="nested deeper than 200"):
        jaxckpt.save(tmp_path / "ckpt", {"data": loader})


# Mismatches -------------------------------------------------------------------------------------------------


def test_the_state_of_another_class_is_refused(path: Path) -> None:
    class Schedule(Loader):
        pass

    target = {"w": jnp.zeros(4), "data": Schedule(), "step": 0}
    with pytest.raises(jaxckpt.MismatchError, match=r"'data' is the state of a .*Loader.*, a .*Schedule") as caught:
        jaxckpt.restore(path, target)
    assert caught.value.paths == ("data",)
    assert "leave the object out with select=, and set its state yourself from jaxckpt.load_numpy" in str(caught.value)
    jaxckpt.register_leaf(
        Schedule,
        to_state=Schedule.state_dict,
        set_state=Schedule.load_state_dict,
        name=f"{Loader.__module__}.{Loader.__qualname__}",
    )
    assert equal(jaxckpt.restore(path, target)["data"], used())


def test_an_object_that_the_checkpoint_lacks_is_missing(path: Path) -> None:
    loader, target = Loader(), {"w": jnp.zeros(4), "data": Loader(), "step": 0}
    with pytest.raises(jaxckpt.MismatchError, match="'more' is not in the checkpoint"):
        jaxckpt.restore(path, {**target, "more": loader})
    restored = jaxckpt.restore(path, {**target, "more": loader}, strict=False)
    assert restored["more"] is loader
    assert equal(loader, Loader())
    with pytest.raises(
        jaxckpt.MismatchError, match="'data/epoch' and 9 more leaves below 'data' are in the checkpoint but"
    ):
        jaxckpt.restore(path, {"w": jnp.zeros(4), "step": 0})
    jaxckpt.save(path, {"w": jnp.ones(4), "data": None}, overwrite=True)
    with pytest.raises(jaxckpt.MismatchError, match="'data' is not in the checkpoint; None was saved there"):
        jaxckpt.restore(path, {"w": jnp.zeros(4), "data": loader})


def test_an_object_in_two_places_is_saved_twice_and_a_subclass_is_refused(tmp_path: Path) -> None:
    class Counter:
        n = 5

        def get_state(self) -> Any:
            return {"n": self.n}

        def set_state(self, state: Any) -> None:
            self.n = state["n"]

    class Special(Counter):
        pass

    counter = Counter()
    jaxckpt.save(tmp_path / "c", {"a": counter, "b": counter})
    assert [*jaxckpt.open(tmp_path / "c")] == ["a/n", "b/n"]
    counter.n = 0
    jaxckpt.restore(tmp_path / "c", {"a": counter, "b": counter})
    assert counter.n == 5
    with pytest.raises(
        jaxckpt.MismatchError, match=r"'b' is the state of a .*Counter in the checkpoint, a .*Special in"
    ):
        jaxckpt.restore(tmp_path / "c", {"a": counter, "b": Special()})


def test_an_object_is_selected_whole_or_not_at_all(path: Path) -> None:
    loader = Loader()
    target = {"w": jnp.zeros(4), "data": loader, "step": 0}
    assert jaxckpt.restore(path, target, select="w")["data"] is loader
    assert equal(loader, Loader())
    with pytest.raises(jaxckpt.MismatchError, match=r"'data' is an object, and select= leaves out 9 of the 10 leaves"):
        jaxckpt.restore(path, target, select=["data/epoch", "w"])
    jaxckpt.restore(path, target, select="data")
    assert equal(loader, used())
    assert jaxckpt.restore(path, select="data/epoch")["data"]["epoch"] == 3


def test_an_object_moves_with_rename(path: Path) -> None:
    for rename in ({"data": "input/loader"}, lambda path: path.replace("data", "input/loader")):
        loader = Loader()
        jaxckpt.restore(path, {"w": jnp.zeros(4), "input": {"loader": loader}, "step": 0}, rename=rename)
        assert type(loader.note["parts"]) is list
        assert equal(loader, used())
    for rename in ({"w": "weight"}, {"": "all"}):  # lists in a state stay lists, even if other leaves are renamed
        tree = jaxckpt.restore(path, rename=rename)
        assert tree.get("all", tree)["data"]["seen"][1] == "two"


def test_a_state_is_never_cast(tmp_path: Path) -> None:
    class Average:
        def __init__(self) -> None:
            self.state = {"mean": np.full(3, 0.1), "on_device": jnp.full(3, 0.1)}

        def get_state(self) -> Any:
            return self.state

        def set_state(self, state: Any) -> None:
            self.state = state

    tree = {"w": jnp.full(3, 0.1), "average": Average()}
    jaxckpt.save(tmp_path / "ckpt", tree, dtype=jnp.bfloat16)
    checkpoint = jaxckpt.open(tmp_path / "ckpt")
    assert [str(leaf.dtype) for leaf in checkpoint.leaves.values()] == ["float64", "float32", "bfloat16"]
    jaxckpt.save(tmp_path / "ckpt", tree, overwrite=True)
    for target in (None, {"w": jnp.zeros(3), "average": Average()}):
        restored = jaxckpt.restore(tmp_path / "ckpt", target, dtype=jnp.bfloat16)
        state = restored["average"] if target is None else restored["average"].state
        assert (restored["w"].dtype, state["mean"].dtype) == (jnp.bfloat16, np.float64)
    with pytest.raises(jaxckpt.errors.TreeError, match="belongs to the state of an object"):
        jaxckpt.save(tmp_path / "ckpt", tree, dtype={"average": {"mean": jnp.float16}}, overwrite=True)


def test_the_arrays_of_a_state_go_onto_the_mesh(tmp_path: Path) -> None:
    class Average:
        def __init__(self, value: Any) -> None:
            self.value = value

        def state_dict(self) -> Any:
            return {"value": self.value}

        def load_state_dict(self, state: Any) -> None:
            self.value = state["value"]

    mesh = Mesh(np.array(jax.devices()).reshape(8), ("data",))
    other = Mesh(np.array(jax.devices()[:4]).reshape(4), ("data",))
    jaxckpt.save(tmp_path / "ckpt", [Average(jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data"))))])
    (average,) = jaxckpt.restore(tmp_path / "ckpt", [Average(None)], mesh=other)
    assert average.value.sharding == NamedSharding(other, P("data"))
    plan = jaxckpt.open(tmp_path / "ckpt").plan([Average(None)], mesh=other)
    assert plan.needed_bytes == 32


@pytest.mark.one_device
def test_a_sharding_for_a_whole_tree_leaves_a_state_on_the_host(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ckpt", {"data": used(), "w": np.ones(4, np.float32)})
    on_one = SingleDeviceSharding(jax.devices()[1 % len(jax.devices())])
    for target in (on_one, {"data": on_one, "w": on_one}):
        tree = jaxckpt.restore(tmp_path / "ckpt", target)
        assert tree["w"].sharding == on_one
        assert type(tree["data"]["order"]) is np.ndarray
        assert tree["data"]["order"].dtype == np.int64


# Registered types -------------------------------------------------------------------------------------------


def test_registered_values_come_back_with_and_without_a_target(tmp_path: Path) -> None:
    jaxckpt.register_leaf(decimal.Decimal, to_state=str, from_state=decimal.Decimal)
    jaxckpt.register_leaf(Color, to_state=lambda color: color.name, from_state=Color.__getitem__)
    jaxckpt.register_leaf(
        datetime.datetime, to_state=datetime.datetime.isoformat, from_state=datetime.datetime.fromisoformat
    )
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    tree = {"rate": decimal.Decimal("0.10"), "colors": [Color.BLUE, Color.RED], "at": moment, "n": 1}
    jaxckpt.save(tmp_path / "ckpt", tree)
    assert [*jaxckpt.open(tmp_path / "ckpt")] == ["at", "colors/0", "colors/1", "n", "rate"]
    target = {"rate": decimal.Decimal(0), "colors": [Color.RED] * 2, "at": datetime.datetime.min, "n": 0}
    for restored in (
        jaxckpt.restore(tmp_path / "ckpt"),
        jaxckpt.load_numpy(tmp_path / "ckpt"),
        jaxckpt.restore(tmp_path / "ckpt", target),
        jaxckpt.restore(tmp_path / "ckpt", rename={"": ""}),
    ):
        restored["colors"] = list(
            restored["colors"].values() if isinstance(restored["colors"], dict) else restored["colors"]
        )
        assert restored == tree
        assert type(restored["colors"][0]) is Color
    with pytest.raises(jaxckpt.MismatchError, match=r"'rate' is the state of a decimal\.Decimal"):
        jaxckpt.restore(tmp_path / "ckpt", {**target, "rate": moment})
    pytree._TYPES.clear()
    plain = {"rate": "0.10", "colors": ["BLUE", "RED"], "at": moment.isoformat(), "n": 1}
    assert jaxckpt.restore(tmp_path / "ckpt") == plain, "unregistered types are not created"


def test_a_registered_type_changes_in_place_if_it_can(tmp_path: Path) -> None:
    jaxckpt.register_leaf(
        np.random.Generator,
        to_state=lambda one: one.bit_generator.state,
        set_state=lambda one, state: setattr(one.bit_generator, "state", state),
    )
    random = np.random.default_rng(3)
    random.random(5)
    jaxckpt.save(tmp_path / "ckpt", {"rng": random})
    fresh = np.random.default_rng(0)
    assert jaxckpt.restore(tmp_path / "ckpt", {"rng": fresh})["rng"] is fresh
    assert fresh.random() == random.random()


def test_an_invalid_registration_is_refused(tmp_path: Path) -> None:
    def register(cls: Any = Money, **arguments: Any) -> None:
        jaxckpt.register_leaf(cls, **{"to_state": vars, "from_state": Money, **arguments})

    for cls in (int, np.ndarray, np.float32, dict, jax.Array, jax.ShapeDtypeStruct):
        with pytest.raises(jaxckpt.errors.InputError, match="needs no register_leaf"):
            register(cls)
    for arguments, match in [
        ({"cls": "Money"}, "takes a class"),
        ({"to_state": None}, "to_state must be a function"),
        ({"set_state": 3}, "set_state must be a function"),
        ({"from_state": None}, "needs from_state=, set_state= or both"),
        ({"name": ""}, "name must be a non-empty str"),
    ]:
        with pytest.raises(jaxckpt.errors.InputError, match=match):
            register(**arguments)
    register(name="money")
    with pytest.raises(jaxckpt.errors.InputError, match=r"Money has the name 'money'"):
        register(decimal.Decimal, name="money")
    register(collections.OrderedDict)
    with pytest.raises(jaxckpt.errors.TreeError, match="JAX treats it as a container"):
        jaxckpt.save(tmp_path / "ckpt", {"a": collections.OrderedDict(b=1)})


def test_a_class_that_a_notebook_redefines_replaces_the_first(tmp_path: Path) -> None:
    def define() -> Any:
        class Money:
            def __init__(self, cents: int) -> None:
                self.cents = cents

        jaxckpt.register_leaf(Money, to_state=lambda one: one.cents, from_state=Money)
        return Money

    define()
    money = define()
    jaxckpt.save(tmp_path / "ckpt", [money(5)])
    (restored,) = jaxckpt.restore(tmp_path / "ckpt")
    assert type(restored) is money
    assert restored.cents == 5


def test_an_error_of_from_state_names_the_leaf(tmp_path: Path) -> None:
    def refuse(state: Any) -> Any:
        raise ValueError("not enough")

    jaxckpt.register_leaf(Money, to_state=vars, from_state=refuse)
    jaxckpt.save(tmp_path / "ckpt", {"a": {"b": Money(3)}})
    for target in (None, {"a": {"b": Money(0)}}):
        with pytest.raises(ValueError, match="not enough") as caught:
            jaxckpt.restore(tmp_path / "ckpt", target)
        assert "'a/b" in caught.value.__notes__[0]


def test_names_of_registered_types_are_compared_completely(tmp_path: Path) -> None:
    def register(name: str) -> Any:
        cls = type("Amount", (Money,), {})
        cls.__qualname__ = name
        jaxckpt.register_leaf(cls, to_state=lambda one: one.cents, from_state=cls, name=f"{name}-1.0")
        return cls

    money, weight = register("money"), register("weight")
    jaxckpt.save(tmp_path / "ckpt", {"a": money(3)})
    with pytest.raises(jaxckpt.MismatchError, match=r"state of a money-1.0 in the checkpoint, a weight-1.0 in"):
        jaxckpt.restore(tmp_path / "ckpt", {"a": weight(0)})


def test_objects_that_rename_merges_become_plain_leaves(tmp_path: Path) -> None:
    jaxckpt.register_leaf(Money, to_state=lambda one: one.cents, from_state=Money)
    jaxckpt.save(tmp_path / "a", {"a": Money({"x": 1}), "b": Money({"y": 2}), "z": 3})
    for read in (jaxckpt.restore, jaxckpt.load_numpy):
        assert read(tmp_path / "a", rename={"a": "c", "b": "c"})["c"] == {"x": 1, "y": 2}
        assert read(tmp_path / "a", rename={"a": "", "b": "b"})["x"] == 1
        assert read(tmp_path / "a", rename={"z": "a/z"})["a"] == {"x": 1, "z": 3}
        assert type(read(tmp_path / "a", rename={"a": "deep/a"})["deep"]["a"]) is Money
    jaxckpt.convert(tmp_path / "a", tmp_path / "b", rename={"a": "c", "b": "c"})
    assert [*jaxckpt.open(tmp_path / "b")] == ["c/x", "c/y", "z"]


def test_an_object_whose_leaves_are_all_selected_keeps_the_empty_containers_of_its_state(tmp_path: Path) -> None:
    state = {"full": 1, "empty": {}, "none": None}

    class Money:
        def get_state(self) -> Any:
            return state

        def set_state(self, state: Any) -> None: ...

    jaxckpt.save(tmp_path / "ckpt", {"box": Money(), "w": 1, "other": {}})
    assert jaxckpt.load_numpy(tmp_path / "ckpt", select="box/full") == {"box": state}
    assert jaxckpt.load_numpy(tmp_path / "ckpt", select="box/empty") == {"box": {"empty": {}}}
    assert jaxckpt.load_numpy(tmp_path / "ckpt", select="w") == {"w": 1}


def test_an_object_whose_state_is_empty_is_renamed_and_selected(tmp_path: Path) -> None:
    class Box:
        got = "nothing"

        def get_state(self) -> Any:
            return {}

        def set_state(self, state: Any) -> None:
            self.got = state

    jaxckpt.save(tmp_path / "ckpt", {"w": 1, "box": Box()})
    box = Box()
    jaxckpt.restore(tmp_path / "ckpt", {"v": 0, "box": box}, rename={"w": "v"}, select="v")
    assert box.got == "nothing", "it is not selected"
    jaxckpt.restore(tmp_path / "ckpt", {"run": {"w": 0, "box": box}}, rename=lambda path: f"run/{path}")
    assert box.got == {}


# Several processes ------------------------------------------------------------------------------------------


def test_processes_must_agree_on_an_objects_state(tmp_path: Path, run_processes: RunProcesses) -> None:
    run_processes(PROGRAMS / "objects_in_two.py", processes=2, devices_per_process=1, args=str(tmp_path), word=PASSED)
