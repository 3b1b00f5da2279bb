"""Any sequence of saves, deletions, failures, crashes and restores gives the same result as a dict."""

from __future__ import annotations

import contextlib
import errno
import itertools
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
import victims
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reliability import Fault
from victims import OPTIONS, Saver, require_version, version, version_at

import jaxckpt

pytestmark = pytest.mark.child

meshes = st.sampled_from([(8, 1), (4, 2), (2, 4), (1, 8), (2, 1), (1, 1)])
names = st.sampled_from(["one", "two"])


def mesh_of(shape: tuple[int, int]) -> Mesh:
    return Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("x", "y"))


def tree_of(number: int, shape: tuple[int, int]) -> dict[str, Any]:
    """The tree of a version, sharded over a mesh."""
    tree = version(number)
    return {**tree, "a": jax.device_put(tree["a"], NamedSharding(mesh_of(shape), P("x", "y")))}


@contextlib.contextmanager
def files_of_8_kib() -> Generator[None]:
    """Limit the file size, so that an object exceeds the limit but the manifest does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Model(RuleBasedStateMachine):
    """Two paths and a Checkpointer's directory. Each save writes a new version.

    The state after a crash differs from run to run, so no value that Hypothesis draws may depend on that state.
    """

    def __init__(self, fault: Fault, folder: Path) -> None:
        super().__init__()
        self.fault = fault
        self.folder = folder
        self.numbers = itertools.count(1)
        self.there: dict[str, int] = {}
        """The version at each path."""

        self.pending: tuple[jaxckpt.PendingSave, str, int] | None = None
        """(running background save, its path, its version)."""

        self.steps: dict[int, int] = {}
        """The version of each step."""

        self.newest = 0
        self.checkpointer = self.opened()

    def opened(self) -> jaxckpt.Checkpointer:
        return jaxckpt.Checkpointer(self.folder / "steps", keep_last=2, options=OPTIONS)

    # One path ------------------------------------------------------------------------------------------------

    @rule(name=names, shape=meshes, overwrite=st.booleans())
    def save(self, name: str, shape: tuple[int, int], overwrite: bool) -> None:
        self.wait()
        number = next(self.numbers)
        with contextlib.ExitStack() as expected:
            if name in self.there and not overwrite:
                expected.enter_context(pytest.raises(jaxckpt.errors.CheckpointExistsError))
            else:
                self.there[name] = number
            jaxckpt.save(self.folder / name, tree_of(number, shape), overwrite=overwrite, options=OPTIONS)

    @rule(name=names, shape=meshes)
    def save_in_the_background(self, name: str, shape: tuple[int, int]) -> None:
        self.wait()
        number = next(self.numbers)
        pending = jaxckpt.save_async(self.folder / name, tree_of(number, shape), overwrite=True, options=OPTIONS)
        self.pending = pending, name, number

    @rule()
    def wait(self) -> None:
        if self.pending is not None:
            pending, name, number = self.pending
            pending.wait(victims.SECONDS)
            self.there[name] = number
            self.pending = None

    @rule(name=names, shape=meshes)
    def save_where_the_system_refuses(self, name: str, shape: tuple[int, int]) -> None:
        self.wait()
        self.checkpointer.wait()
        with files_of_8_kib(), pytest.raises(jaxckpt.errors.StorageError) as raised:
            jaxckpt.save(self.folder / name, tree_of(next(self.numbers), shape), overwrite=True, options=OPTIONS)
        assert raised.value.errno == errno.EFBIG

    @rule(name=names, delay=st.floats(0, 0.05))
    def crash_while_it_saves(self, name: str, delay: float) -> None:
        self.wait()
        number = next(self.numbers)
        said = killed(delay, victims.replace, str(self.folder / name), number)
        found = version_at(self.folder / name)
        assert found in ((number,) if said else (self.there.get(name), number))
        if found == number:
            self.there[name] = number

    @rule(name=names, shape=meshes)
    def restore(self, name: str, shape: tuple[int, int]) -> None:
        possible: set[int | None] = {self.there.get(name)}
        if self.pending is not None and self.pending[1] == name:
            possible |= {self.pending[2], None}  # None: replaced during the read
        try:
            tree = jaxckpt.restore(self.folder / name, mesh=mesh_of(shape))
        except jaxckpt.errors.NotACheckpointError:
            assert None in possible
            return
        assert require_version(tree) in possible
        if isinstance(tree["a"], jax.Array):  # leaves saved by a child process are NumPy arrays
            assert tree["a"].sharding.mesh.shape == mesh_of(shape).shape

    # Steps ---------------------------------------------------------------------------------------------------

    @rule(shape=meshes, more=st.integers(1, 3))
    def save_a_step(self, shape: tuple[int, int], more: int) -> None:
        self.newest += more
        number = next(self.numbers)
        self.wait()  # every save waits first
        assert self.checkpointer.save(self.newest, tree_of(number, shape))
        self.steps = keep_two({**self.steps, self.newest: number})

    @rule(shape=meshes)
    def overwrite_the_newest_step(self, shape: tuple[int, int]) -> None:
        if not self.steps:
            return
        number, step = next(self.numbers), max(self.steps)
        self.wait()  # every save waits first
        assert self.checkpointer.save(step, tree_of(number, shape), overwrite=True)
        self.steps[step] = number

    @rule(newest=st.booleans())
    def delete_a_step(self, newest: bool) -> None:
        if not self.steps:
            return
        self.checkpointer.wait()  # old steps are deleted in the background; after this deletion, one more would be kept
        step = max(self.steps) if newest else min(self.steps)
        if len(self.steps) == 1:
            with pytest.raises(jaxckpt.errors.InputError):
                self.checkpointer.delete(step)
        else:
            self.checkpointer.delete(step)
            del self.steps[step]
        self.newest = max(self.steps)

    @rule(delay=st.floats(0, 0.05), delete=st.booleans())
    def crash_with_steps(self, delay: float, delete: bool) -> None:
        self.checkpointer.close()
        folder = str(self.folder / "steps")
        before = self.steps
        if delete and len(before) == 2:
            victim = min(before)
            killed(delay, victims.delete_step, folder, victim)
            after = {step: number for step, number in before.items() if step != victim}
            acknowledged = False
        else:
            # The child process saves the version with the step's number.
            step = self.newest = self.newest + 1
            acknowledged = bool(killed(delay, victims.keep_steps, folder, step))
            after = keep_two({**before, step: step})
        self.checkpointer = self.opened()
        steps = self.checkpointer.steps()
        assert steps in ([sorted(after)] if acknowledged else [sorted(before), sorted(after)])
        self.steps = after if steps == sorted(after) else before
        self.newest = max(steps, default=self.newest)

    @rule(shape=meshes, newest=st.booleans())
    def restore_a_step(self, shape: tuple[int, int], newest: bool) -> None:
        self.checkpointer.wait()
        if not self.steps:
            with pytest.raises(jaxckpt.errors.NotACheckpointError):
                self.checkpointer.restore(mesh=mesh_of(shape))
            return
        step = max(self.steps) if newest else min(self.steps)
        tree = self.checkpointer.restore(None if newest else step, mesh=mesh_of(shape))
        assert require_version(tree) == self.steps[step]

    @invariant()
    def exactly_the_expected_steps_are_listed(self) -> None:
        if self.checkpointer.pending is None or self.checkpointer.pending.done:
            self.checkpointer.wait()  # for the deletion of old steps
            assert self.checkpointer.steps() == sorted(self.steps)

    def teardown(self) -> None:
        self.wait()
        self.checkpointer.close()
        for name, number in self.there.items():
            assert version_at(self.folder / name) == number
            jaxckpt.save(self.folder / name, version(0), overwrite=True)
            assert len(victims.data_folders(self.folder / name)) == 1, "all remains are swept"
        with self.opened() as checkpoints:
            assert checkpoints.steps() == sorted(self.steps)
            for step, number in self.steps.items():
                assert version_at(checkpoints.path(step)) == number
                assert len(victims.data_folders(Path(checkpoints.path(step)))) == 1
        self.fault.saw("same as the dict")


def keep_two(steps: dict[int, int]) -> dict[int, int]:
    return dict(sorted(steps.items())[-2:])


def killed(delay: float, program: Any, *args: Any) -> list[Any]:
    """The messages of a program that is killed `delay` seconds after its start."""
    with Saver(program, *args) as saver:
        saver.go()
        time.sleep(delay)
        saver.kill()
        return saver.end()


@pytest.mark.fault(
    26,
    "any sequence of saves, overwrites, deletions, failures, crashes, restores onto other meshes",
    "the same result as a plain dict",
    quick=5,
    full=300,
)
def test_against_a_dict(fault: Fault, tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in itertools.count())
    settings = hypothesis.settings(
        max_examples=sum(1 for _ in fault.rounds()),
        stateful_step_count=20,
        deadline=None,
        phases=[hypothesis.Phase.generate],  # no shrinking: a crash never repeats at exactly the same moment
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(lambda: Model(fault, next(folders)), settings=settings)
