"""Processes that are killed or get SIGTERM at a random moment of a save."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import victims
from processes import PROGRAMS, environment
from reliability import Fault
from victims import SECONDS, Saver, version_at, versions_in

pytestmark = pytest.mark.child


@pytest.mark.fault(
    1,
    "kill -9 at a random moment",
    "the last acknowledged save is restored with the same bits; a partial save is never listed",
    quick=8,
    full=200,
)
def test_killed_at_random(fault: Fault, tmp_path: Path) -> None:
    last = {"ckpt": 0, "steps": 0}
    for number in fault.rounds():
        name = ("ckpt", "steps")[number % 2]
        path = tmp_path / name
        program = victims.replace if name == "ckpt" else victims.keep_steps
        with Saver(program, str(path), last[name] + 1, 1_000_000) as saver:
            saver.go()
            time.sleep(fault.random.uniform(0.0, 0.2))
            saver.kill()
            done = max([last[name], *saver.end()])
        found = (version_at(path) if name == "ckpt" else max(versions_in(path), default=None)) or 0
        assert found in (done, done + 1), f"{name}: version {found}, of which {done} was acknowledged"
        fault.saw("the last acknowledged" if found == done else "the one in progress, complete")
        last[name] = found


@pytest.mark.fault(
    18, "SIGTERM in an asynchronous save", "committed or cleanly abandoned; the process exits", quick=3, full=90
)
def test_sigterm_in_an_asynchronous_save(fault: Fault, tmp_path: Path) -> None:
    """Runs real programs to Python's own exit, because what they wait for at exit is part of the test."""
    hows = ("Checkpointer", "a handler that exits", "no handler")
    last = dict.fromkeys(hows, 0)
    for number in fault.rounds():
        how = hows[number % 3]
        path = tmp_path / how.replace(" ", "-")
        child = subprocess.Popen(
            [sys.executable, PROGRAMS / "stopped_savers.py", how, str(path), str(last[how] + 1)],
            env=environment(1),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with child:
            try:
                assert child.stdout is not None
                assert child.stdout.readline() == "ready\n"
                time.sleep(fault.random.uniform(0.0, 0.15))
                child.send_signal(signal.SIGTERM)
                out, err = child.communicate(timeout=SECONDS)
            finally:
                child.kill()
        acknowledged = max([last[how], *map(int, re.findall(r"saved (\d+)\n", out))])
        killed = child.returncode == -signal.SIGTERM
        if how == "Checkpointer":
            found = max(versions_in(path), default=0)
            # The Checkpointer installs its signal handler at its first save.
            assert killed or (child.returncode == 143 and found == acknowledged), (child.returncode, err)
            assert not (killed and "listens" in out), err
        else:
            found = version_at(path) or 0
            assert found in (acknowledged, acknowledged + 1)
            # If a handler raises inside a wait in `threading`, another error may replace the handler's exception.
            stopped = child.returncode == 143 or "RuntimeError: release unlocked lock" in err
            assert killed if how == "no handler" else stopped, (child.returncode, err)
            assert killed or len(victims.data_folders(path)) == (found > 0), "no partial data is left"
        fault.saw("abandoned" if found == last[how] else f"committed, {how}")
        last[how] = found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.fault(1, "kill -9 at a random moment", "", system="orbax", quick=1, full=30)
def test_orbax_killed_at_random(fault: Fault, tmp_path: Path) -> None:
    """The same for Orbax, with a similar program: counts the outcomes for its users."""
    if not fault.campaign:
        pytest.skip("counted in the campaign")
    acknowledged, used = {"ckpt": 0, "steps": 0}, 0
    for number in fault.rounds():
        name = ("ckpt", "steps")[number % 2]
        path = tmp_path / name
        program = victims.orbax_replace if name == "ckpt" else victims.orbax_steps
        with Saver(program, str(path), used + 1) as saver:
            saver.go()
            assert saver.next_message() == "imported"
            time.sleep(fault.random.uniform(0.0, 0.5))
            saver.kill()
            said = saver.end()
        acknowledged[name] = max([acknowledged[name], *said])
        used = max([used, *said]) + 1  # one more save may have been in progress
        count_orbax(fault, name, path, acknowledged[name])


def count_orbax(fault: Fault, name: str, path: Path, acknowledged: int) -> None:
    """Restore everything that Orbax lists, and count the outcome."""
    import orbax.checkpoint as ocp

    with contextlib.ExitStack() as entered:
        if name == "ckpt":
            checkpointer = entered.enter_context(ocp.StandardCheckpointer())
            restores = [lambda: checkpointer.restore(path)] if path.exists() else []
        else:
            manager = entered.enter_context(ocp.CheckpointManager(path))
            args = ocp.args.StandardRestore()
            restores = [lambda step=step: manager.restore(step, args=args) for step in manager.all_steps()]
        found: list[int] = []
        for restore in restores:
            try:
                tree = restore()
            except Exception as error:
                fault.saw(f"listed, and will not restore: {type(error).__name__}")
                return
            try:
                found.append(victims.require_version(tree))
            except AssertionError:
                fault.silent(f"{name}: other values than were saved")
                return
    lost = max(found, default=0) < acknowledged
    fault.saw("the acknowledged checkpoint is lost" if lost else "each listed step restores bit-exact")
