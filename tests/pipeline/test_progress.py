"""Progress reports to a callback, a terminal, a log, or stderr."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from processes import PROGRAMS, environment, finish

import jaxckpt
from jaxckpt._pipeline import progress as _progress

TREE = {"a": np.arange(100_000.0), "b": np.ones(1000, np.float32)}
N_BYTES = 804_000
PROGRAM = PROGRAMS / "save_with_progress.py"


def test_a_callback_is_called_until_all_bytes_have_moved(tmp_path: Path) -> None:
    seen: list[jaxckpt.types.Progress] = []
    options = jaxckpt.Options(progress=seen.append)
    jaxckpt.save(tmp_path / "c", TREE, options=options)
    jaxckpt.restore(tmp_path / "c", options=options)
    for verb in ("save", "restore"):
        message = [one for one in seen if one.verb == verb]
        done = [one.done_bytes for one in message]
        assert done == sorted(done)
        assert done[-1] == message[-1].total_bytes == N_BYTES
        assert all(one.seconds > 0 for one in message)


def test_rates_and_remaining_time() -> None:
    half = jaxckpt.types.Progress("save", 3 << 30, 4 << 30, 6.0)
    assert half.bytes_per_second == 2**29
    assert half.remaining_seconds == 2.0
    assert str(half) == "save: 3.0 GiB of 4.0 GiB, 512.0 MiB/s, 2 s left"
    begun = jaxckpt.types.Progress("restore", 0, 4096, 0.0)
    assert (begun.bytes_per_second, begun.remaining_seconds) == (0.0, None)
    assert str(begun) == "restore: 0 B of 4.0 KiB, 0 B/s"


def test_lines_go_to_the_log_if_it_has_a_handler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "jaxckpt"):
        jaxckpt.save(tmp_path / "c", TREE, options=jaxckpt.Options(progress=True))
    line, done = [record.getMessage() for record in caplog.records if record.name == "jaxckpt"]
    assert line.startswith("save: 785.2 KiB of 785.2 KiB, ")
    assert done.startswith(f"saved {tmp_path}/c: ")
    assert capsys.readouterr().err == ""


def test_lines_are_logged_periodically(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _progress._LineLogger()
    for second in range(31):
        lines(jaxckpt.types.Progress("save", second, 30, float(second)))
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == ["10", "20", "30"]


def test_no_bar_without_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_progress.sys.stderr, "isatty", lambda: True)
    with _progress.display_progress("diff", 0, True):
        pass
    assert capsys.readouterr().err == ""
    with _progress.display_progress("verify", 10, True, "[x] {y}") as report:
        report(10)
    assert "verify [x] {y}" in capsys.readouterr().err


def test_a_bar_has_binary_units_and_disappears(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, the captured stream is then a terminal
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(_progress.sys.stderr, "isatty", lambda: True)
    with _progress.display_progress("verify", 4 << 20, True) as report:
        for _ in range(4):
            report(1 << 20)
            time.sleep(0.02)
    drawn = capsys.readouterr().err
    last = re.findall(r"4\.0 MiB of 4\.0 MiB, [\d.]+ MiB/s", drawn)
    assert last, drawn
    assert not re.search(r"[KMG]B/s", drawn)
    assert drawn.endswith("\x1b[1A\x1b[2K")  # the cursor goes up, and the line is erased


def test_a_bar_in_a_narrow_terminal_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setattr(_progress.sys.stderr, "isatty", lambda: True)
    with _progress.display_progress("verify", 4 << 20, True) as report:
        report(1 << 20)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_terminal_that_cannot_erase_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(_progress.sys.stderr, "isatty", lambda: True)
    with _progress.display_progress("verify", 4 << 20, True) as report:
        report(4 << 20)
    assert capsys.readouterr().err.startswith("jaxckpt: verify: 4.0 MiB of 4.0 MiB, ")


@pytest.mark.child
def test_without_a_terminal_a_line_goes_to_stderr(tmp_path: Path) -> None:
    done = finish(PROGRAM, tmp_path / "c")
    assert (done.returncode, done.stdout) == (0, ""), str(done)
    assert done.stderr.startswith("jaxckpt: save: 781.2 KiB of 781.2 KiB, ")


@pytest.mark.child
def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, PROGRAM, str(tmp_path / "c")], env=environment(1) | {"TERM": "xterm"}, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            found = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not found:
            break
        shown += found
    assert child.wait(timeout=60) == 0
    os.close(ours)
    assert b"781.2" in shown
    assert b"KiB" in shown


def test_silent_by_default(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    jaxckpt.save(tmp_path / "c", TREE)
    jaxckpt.load_numpy(tmp_path / "c")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".zarr", ""])
def test_a_conversion_reports_progress_to_the_end(tmp_path: Path, suffix: str) -> None:
    jaxckpt.save(tmp_path / "c", TREE, options=jaxckpt.Options(chunk_bytes=64 << 10))
    seen: list[jaxckpt.types.Progress] = []
    options = jaxckpt.Options(progress=seen.append, object_bytes=1 << 18, chunk_bytes=64 << 10, host_bytes=1 << 18)
    jaxckpt.convert(tmp_path / "c", tmp_path / f"to{suffix}", format=None if suffix else "orbax", options=options)
    done = [one.done_bytes for one in seen]
    assert {one.verb for one in seen} == {"convert"}
    assert done == sorted(done)
    assert len(done) > 3  # not only at the end
    assert done[-1] == seen[-1].total_bytes == N_BYTES


def test_histograms_report_progress(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {**TREE, "not counted": np.arange(3)})
    seen: list[jaxckpt.types.Progress] = []
    jaxckpt.report(tmp_path / "c", histograms=True, options=jaxckpt.Options(progress=seen.append))
    assert seen[-1].done_bytes == seen[-1].total_bytes == N_BYTES
    assert {one.verb for one in seen} == {"report"}
