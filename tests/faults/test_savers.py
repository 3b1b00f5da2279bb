"""Two independent savers on one path: one wins, and the other gets an error."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import victims
from reliability import Fault
from rivals import MOMENTS, ORBAX_CHECKPOINTER, ORBAX_MANAGER, Saver, data_folders, version, versions_at, versions_in

import jaxckpt

pytestmark = pytest.mark.child

PROMISE = "one wins, the other raises; never a mix"


def race(savers: list[Saver], fault: Fault, spread_seconds: float, **asked: Any) -> list[str]:
    """Let the savers save versions 1, 2, … at nearly the same time; returns the outcome of each."""
    start = time.time() + 0.02
    for number, saver in enumerate(savers, 1):
        saver.request(version=number, start=start + fault.random.uniform(0, spread_seconds), **asked)
    for saver in savers:
        assert saver.next_message() == "prepared"
    return [saver.next_message() for saver in savers]


@pytest.mark.fault(13, "two processes save to one path", PROMISE, quick=8, full=200)
def test_two_savers_of_a_new_checkpoint(fault: Fault, tmp_path: Path) -> None:
    run_races(fault, tmp_path, overwrite=False)


@pytest.mark.fault(13, "two processes replace one checkpoint", PROMISE, quick=8, full=200)
def test_two_savers_that_replace_a_checkpoint(fault: Fault, tmp_path: Path) -> None:
    run_races(fault, tmp_path, overwrite=True)


def run_races(fault: Fault, tmp_path: Path, *, overwrite: bool) -> None:
    path = tmp_path / "ckpt"
    with contextlib.ExitStack() as stack:
        savers = [stack.enter_context(Saver()) for _ in range(2)]
        assert [saver.next_message() for saver in savers] == ["ready"] * 2
        for _ in fault.rounds():
            shutil.rmtree(path, ignore_errors=True)
            if overwrite:
                jaxckpt.save(path, version(9), options=jaxckpt.Options(sync=False))
            said = race(savers, fault, 0.03, path=str(path), overwrite=overwrite, sync=fault.random.random() < 0.3)
            winners = [number for number, text in enumerate(said, 1) if text == "saved"]
            losers = [text for text in said if text != "saved"]
            assert all(text.startswith("CheckpointExistsError") for text in losers), said
            found = versions_at(path)
            if len(found) != 1:
                fault.silent(f"a mix of {found}; {said}")
            elif found[0] not in winners:
                fault.silent(f"version {found[0]} exists; {said}")
            elif len(winners) == 2 and not overwrite:
                fault.silent("both reported success")
            else:
                # With overwrite, the second may succeed too if it started after the first had published.
                fault.saw("one won, the other raised" if losers else "both saved, one after the other")
            assert len(data_folders(path)) == 1, "the loser's data is deleted"


@pytest.mark.fault(13, "two runs repeatedly replace one step, and link unchanged objects", PROMISE, quick=2, full=40)
def test_two_savers_that_link(fault: Fault, tmp_path: Path) -> None:
    for number in fault.rounds():
        path = tmp_path / str(number)
        with contextlib.ExitStack() as stack:
            makers = [victims.Saver(victims.keep_frozen, str(path), 1, 12, base, True) for base in (1, 2)]
            savers = [stack.enter_context(saver) for saver in makers]
            for saver in savers:
                saver.go()
            said = [text for saver in savers for text in saver.end()]
        assert all(isinstance(text, int) or "another save published" in text for text in said), said
        assert jaxckpt.verify(path).ok
        assert victims.frozen_step(path / "00000001") > 0
        fault.saw("complete")
        assert len(data_folders(path / "00000001")) == 1
        assert all(file.stat().st_nlink == 1 for file in path.rglob("data-*/*/c/**/*") if file.is_file())


@pytest.mark.fault(13, "three threads of one process save to one path", PROMISE, quick=5, full=50)
def test_three_threads_on_one_path(fault: Fault, tmp_path: Path) -> None:
    for number in fault.rounds():
        path = tmp_path / str(number)
        outcomes: list[str] = []

        def attempt(number: int, path: Path = path, outcomes: list[str] = outcomes) -> None:
            try:
                jaxckpt.save(path, version(number), options=jaxckpt.Options(sync=False))
                outcomes.append(f"saved {number}")
            except jaxckpt.errors.CheckpointExistsError:
                outcomes.append("refused")

        threads = [threading.Thread(target=attempt, args=(i,)) for i in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert sorted(outcome.split()[0] for outcome in outcomes) == ["refused", "refused", "saved"]
        found = versions_at(path)
        if len(found) == 1 and f"saved {found[0]}" in outcomes:
            fault.saw("one won, the others raised")
        else:
            fault.silent(f"{found}; {outcomes}")
        assert len(data_folders(path)) == 1


@pytest.mark.filterwarnings("ignore")  # Orbax raises some
@pytest.mark.parametrize(
    "api",
    [
        pytest.param(
            api,
            marks=pytest.mark.fault(13, f"two processes save to one path, {api}", PROMISE, full=100, system="orbax"),
        )
        for api in ("CheckpointManager", "StandardCheckpointer")
    ],
)
def test_two_savers_with_orbax(fault: Fault, tmp_path: Path, api: str) -> None:
    if not fault.campaign:
        pytest.skip("only in the campaign")
    import orbax.checkpoint as ocp

    with contextlib.ExitStack() as stack:
        program = ORBAX_MANAGER if api == "CheckpointManager" else ORBAX_CHECKPOINTER
        savers = [stack.enter_context(Saver(program)) for _ in range(2)]
        assert [saver.next_message() for saver in savers] == ["ready"] * 2
        for number in fault.rounds():
            path = tmp_path / str(number)
            if api == "CheckpointManager":
                path.mkdir()
            said = race(savers, fault, 0.1, path=str(path), overwrite=False)
            winners = [number for number, text in enumerate(said, 1) if text == "saved"]
            try:
                step = path / "1" / "default" if api == "CheckpointManager" else path
                with ocp.StandardCheckpointer() as checkpointer:
                    found = versions_in(checkpointer.restore(step, version(0)))
            except Exception as error:
                text = f"{api}: {type(error).__name__} on restoring"
                if winners:
                    fault.silent(f"{text}, though {len(winners)} reported success")
                else:
                    fault.saw("both raised; nothing restores")
                continue
            if len(found) != 1:
                fault.silent(f"{api}: a mix of {found}; {len(winners)} reported success")
            elif winners == found:
                fault.saw("one won, the other raised")
            elif not winners:
                fault.saw("both raised; one checkpoint exists")
            else:
                fault.silent(f"{api}: version {found[0]} exists; versions {winners} reported success")


@pytest.mark.fault(
    14,
    "a suspended save resumes after another one took over, or after its data was deleted",
    "it neither publishes nor deletes",
    quick=6,
    full=None,
)
def test_a_saver_that_wakes_late(fault: Fault, tmp_path: Path) -> None:
    strikes = ("taken over", "data deleted", "path recreated")
    cases = [(None, what, False) for what in strikes for _ in range(12)]
    for moment, what, sync in itertools.product(MOMENTS, strikes, (True, False)):
        if sync or not moment.startswith("syncing"):
            cases.append((moment, what, sync))
    path, rest = tmp_path / "ckpt", jaxckpt.Options(sync=False)
    # Shuffled, so that a few rounds do not test only the first moments.
    fault.random.shuffle(cases)
    with Saver() as sleeper:
        assert sleeper.next_message() == "ready"
        for moment, what, sync in fault.rounds(cases):
            shutil.rmtree(path, ignore_errors=True)
            jaxckpt.save(path, version(1), options=rest)
            stop = {} if moment is None else {"stop_at": moment}
            sleeper.request(path=str(path), version=2, overwrite=True, sync=sync, **stop)
            assert sleeper.next_message() == "prepared"
            if moment is None:
                time.sleep(fault.random.uniform(0, 0.03))
                sleeper.stop()
            else:
                sleeper.stopped()
            published = versions_at(path)
            own = [name for name in data_folders(path) if (path / name / "writer.json").exists()]
            taker = threading.Thread(target=strike, args=(path, what, published, own), daemon=True)
            taker.start()
            taker.join(3)
            waited = taker.is_alive()  # the sleeper holds the lock for starting and publishing
            sleeper.wake()
            taker.join(60)
            assert not taker.is_alive()
            said = sleeper.next_message()
            # The save started from version 1. Its own data or version 1 is gone now, so it must fail.
            late = published == [1] and not waited and bool(own)
            late = late or (moment == "making its folder" and what != "data deleted")
            check(fault, path, said, published, what, waited, late)


def strike(path: Path, what: str, published: list[int], own: list[str]) -> None:
    """Change the path of a suspended saver."""
    if what == "path recreated":
        shutil.rmtree(path, ignore_errors=True)
    if what == "data deleted":
        for name in own if published == [1] else []:  # after publication, this would delete the checkpoint itself
            shutil.rmtree(path / name, ignore_errors=True)
        return
    # This save may wait for the sleeper's lock, and fail if the sleeper then publishes first.
    with contextlib.suppress(jaxckpt.errors.CheckpointExistsError):
        jaxckpt.save(path, version(3), overwrite=True, options=jaxckpt.Options(sync=False))


def check(fault: Fault, path: Path, said: str, published: list[int], what: str, waited: bool, late: bool) -> None:
    """Check that the path holds exactly the expected checkpoint, complete, and nothing else."""
    found = versions_at(path)
    struck = [1] if what == "data deleted" else [3]
    if len(found) != 1:
        fault.silent(f"{what}: {found}; {said}")
    elif said != "saved":
        assert said.startswith(("CheckpointExistsError", "StorageError", "DataError", "PathNotSharedError")), said
        if found == struck:
            fault.saw("it raised; the other checkpoint is unchanged")
        else:
            fault.silent(f"{what}: it raised, yet {found} exists")
    elif late:
        fault.silent(f"{what}: it was too late, yet reported success; {found} exists")
    elif found == [2]:
        fault.saw("it started or finished first" if not waited else "the other waited for it")
    elif published == [2] and found == struck:
        fault.saw("it had published, and was replaced")
    elif waited and found == struck:
        fault.saw("the other waited for it")
    else:
        fault.silent(f"{what}: reported success, yet {found} exists")
    assert np.unique(data_folders(path)).size == 1, data_folders(path)
