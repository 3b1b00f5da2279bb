"""What docs/adopt.md and docs/keras.md say about other libraries. `make check` runs the pages on Equinox and NNX."""

from __future__ import annotations

import abc
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import processes
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.checkpoint_managers import preservation_policy, save_decision_policy
from page_blocks import DOCS, blocks

import jaxckpt
import jaxckpt.orbax

DATA = Path(__file__).parents[1] / "data" / "adopt"
PAGE = (DOCS / "adopt.md").read_text()


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def execute(source: str, names: dict[str, Any]) -> None:
    """Execute a copy of another library's source, whose annotations name what it imports."""
    exec("from __future__ import annotations\n" + source, names)


def test_the_versions_are_those_that_are_installed_to_run_the_page() -> None:
    lock = (DOCS.parent / "requirements-dev.lock").read_text()
    for name, package in (("Keras", "keras"), ("Equinox", "equinox"), ("Flax NNX", "flax")):
        (version,) = re.findall(rf"^\| \[{name}\]\(\S+\) \| ([\d.]+)", PAGE, re.MULTILINE)
        assert re.search(rf"^{package}=={re.escape(version)}( |$)", lock, re.MULTILINE)


def test_keras(run_python: processes.RunPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("keras")
    monkeypatch.chdir(tmp_path)
    run_python(processes.PROGRAMS / "adopt_keras.py", word=processes.PASSED, timeout=240)


# Levanter ---------------------------------------------------------------------------------------------------


def test_levanter(run_python: processes.RunPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("levanter")
    monkeypatch.chdir(tmp_path)
    program = processes.PROGRAMS / "adopt_levanter.py"
    run_python(program, word=processes.PASSED, timeout=240, env={"WANDB_MODE": "disabled"})


@dataclass(frozen=True)
class State:
    """What the hook uses of Levanter's TrainerState."""

    step: jax.Array
    w: jax.Array

    @property
    def saveable_state(self) -> dict[str, jax.Array]:
        return {"step": self.step, "w": self.w}


@pytest.fixture
def levanter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The classes that call the hook, from a copy of Levanter's source, also as the module `levanter.callbacks`."""
    module = ModuleType("levanter")
    for name in ("levanter", "levanter.callbacks"):
        monkeypatch.setitem(sys.modules, name, module)
    unused = {"JitCallback": type("JitCallback", (), {}), "S": TypeVar("S"), "Generic": Generic}
    vars(module).update(unused, abc=abc, ABC=abc.ABC, dataclass=dataclass, callbacks=module)
    execute((DATA / "levanter_hooks.txt").read_text(), vars(module))
    return module


@pytest.mark.parametrize(("until", "steps"), [(20, [10, 20]), (25, [10, 20, 25])])
def test_levanters_hooks_save_each_step_once(
    levanter: ModuleType, tmp_path: Path, until: int, steps: list[int]
) -> None:
    names: dict[str, Any] = {}
    exec(blocks("adopt.md", "Levanter")[0], names)
    hooks = levanter.TrainerHooks()
    with jaxckpt.Checkpointer(tmp_path / "run", every=10) as checkpoints:
        hooks.add_hook(names["Checkpoints"](checkpoints, None))
        for step in range(1, until + 1):
            info = levanter.StepInfo(State(jax.numpy.asarray(step), jax.numpy.full(8, step)), 0.0, 0.0)
            hooks.run_hooks(info)
        hooks.run_hooks(info, force=True)  # as Trainer.train does after its last step
    run = jaxckpt.Run(tmp_path / "run")
    assert run.steps() == steps
    again = levanter.TrainerHooks()  # a finished run that is started again calls only the last hooks
    with jaxckpt.Checkpointer(tmp_path / "run", every=10) as checkpoints:
        again.add_hook(names["Checkpoints"](checkpoints, checkpoints.latest_step()))
        again.run_hooks(info, force=True)
    assert jaxckpt.load_numpy(run.path(until))["w"].tolist() == [until] * 8


# MaxText ----------------------------------------------------------------------------------------------------


def maxtext_manager(source: str, directory: Path) -> ocp.CheckpointManager:
    """MaxText's manager, from the source of its function."""

    def mkdir(path: str) -> epath.Path:
        epath.Path(path).mkdir(parents=True, exist_ok=True)
        return epath.Path(path)

    names: dict[str, Any] = {
        "ocp": ocp,
        "jaxckpt": jaxckpt,
        "CheckpointManagerOptions": ocp.CheckpointManagerOptions,
        "PyTreeCheckpointHandler": ocp.PyTreeCheckpointHandler,
        "save_decision_policy_lib": save_decision_policy,
        "preservation_policy_lib": preservation_policy,
        "gcs_utils": SimpleNamespace(mkdir_and_check_permissions=mkdir),
        "max_logging": SimpleNamespace(log=str),
    }
    execute(source, names)
    create: Callable[..., ocp.CheckpointManager] = names["create_orbax_checkpoint_manager"]
    return create(os.fspath(directory), True, True, 10, dataset_type="synthetic")


def maxtext_state(step: int) -> dict[str, Any]:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    kernel = jax.device_put(np.full((8, 16), step, np.float32), NamedSharding(mesh, P("data", "model")))
    return {"step": jax.device_put(step, NamedSharding(mesh, P())), "params": {"params": {"kernel": kernel}}}


def maxtext_save(manager: ocp.CheckpointManager, step: int) -> bool:
    """The calls in MaxText's save_checkpoint."""
    state = maxtext_state(step)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=2 << 30), state)
    args = ocp.args.PyTreeSave(item=state, save_args=save_args, ocdbt_target_data_file_size=2 << 30)
    return manager.save(step, args=ocp.args.Composite(items=args), force=False, custom_metadata={"scan_layers": True})


def maxtext_restore(manager: ocp.CheckpointManager, step: int) -> Any:
    """The calls in MaxText's load_state_if_possible."""
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), maxtext_state(0))
    restore_args = jax.tree.map(lambda leaf: ocp.type_handlers.ArrayRestoreArgs(sharding=leaf.sharding), target)
    args = ocp.args.PyTreeRestore(item=target, restore_args=restore_args, partial_restore=True)
    return manager.restore(step, args=ocp.args.Composite(items=args))["items"]


def test_maxtext(tmp_path: Path) -> None:
    source = (DATA / "maxtext_manager.txt").read_text()
    (diff,) = blocks("adopt.md", "MaxText", "diff")
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    assert source.count(before) == 1
    run = tmp_path / "run"
    with maxtext_manager(source, run) as manager:  # Orbax writes step 0
        assert maxtext_save(manager, 0)
    with maxtext_manager(source.replace(before, after), run) as manager:  # jaxckpt writes steps 10 and 20
        assert [maxtext_save(manager, step) for step in (5, 10, 20)] == [False, True, True]
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [0, 10, 20]
        for step in (0, 10, 20):
            restored, expected = maxtext_restore(manager, step), maxtext_state(step)
            assert int(restored["step"]) == step
            kernel, saved = restored["params"]["params"]["kernel"], expected["params"]["params"]["kernel"]
            assert np.array_equal(kernel, saved)
            assert kernel.sharding == saved.sharding
    assert [jaxckpt.open(run / f"{step}/items").format for step in (0, 10, 20)] == ["orbax", "jaxckpt", "jaxckpt"]
    assert jaxckpt.verify(run / "20/items").ok
    assert jaxckpt.open(run / "20/items").leaves["params/params/kernel"].spec == P("data", "model")


def test_maxtext_reads_parameters_from_a_converted_step(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "items", maxtext_state(20))
    jaxckpt.convert(tmp_path / "items", tmp_path / "for-orbax/items", format="orbax")
    params = maxtext_state(0)["params"]
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    # The calls in MaxText's load_params_from_path:
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
    restore_args = {"params": ocp.checkpoint_utils.construct_restore_args(target)}
    path = epath.Path(tmp_path / "for-orbax/items")
    restored = checkpointer.restore(path, item={"params": target}, transforms={}, restore_args=restore_args)
    kernel = restored["params"]["params"]["kernel"]
    assert np.array_equal(kernel, np.full((8, 16), 20))
    assert kernel.sharding.spec == P("data", "model")
