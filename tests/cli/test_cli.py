"""The command line: tables at each width, written and deleted files, exit codes, processes, and its docs page."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import resource
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import mindspore_files
import numpy as np
import processes
import pytest
import servers
from command_line import command, days, run, run_json, runner
from jax.sharding import PartitionSpec

import jaxckpt
from jaxckpt._cli.main import main
from jaxckpt._options import Options
from jaxckpt._store.store_path import store_at

ROOT = Path(__file__).parents[2]
TIMEOUT = 120

# Tables ---------------------------------------------------------------------------------------------------

TABLES = {
    "ls": ("ls", "run1"),
    "show": ("show", "run1/00000300"),
    "plan": ("plan", "run1/00000300", "--mesh", "data=4,model=2", "--devices-per-process", "4"),
    "diff": ("diff", "run1/00000100", "run1/00000300"),
}


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("name", TABLES)
def test_tables_match_the_stored_output(here: Path, name: str, width: int) -> None:
    shown = run(*TABLES[name], width=width, code=name == "diff").stdout
    expected = (ROOT / f"tests/cli/output/{name}-{width}.txt").read_text()
    assert shown.replace(days(), "DAYS d") == expected
    assert max(map(len, shown.splitlines())) <= width


# Commands -------------------------------------------------------------------------------------------------


def test_convert(here: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    reported = run("convert", "run1/00000300", out, "--mesh", "model=4", "--specs", "weights/wte=P(None, 'model')",
               "--select", "weights", "--rename", "params=weights", "--chunk-bytes", "1KiB").stdout  # fmt: skip
    assert reported == f"run1/00000300 → {out}\n"
    made = jaxckpt.open(out)
    assert set(made.leaves) == {
        f"weights{path[6:]}" for path in jaxckpt.open("run1/00000300") if path.startswith("params")
    }
    assert made["weights/wte"].spec == PartitionSpec(None, "model")
    assert made["weights/layers/0/kernel"].spec == PartitionSpec(None, "model")  # saved spec, without axis "data"
    assert np.array_equal(made["weights/wte"][...], np.arange(1024).reshape(64, 16))
    assert "--overwrite replaces it" in run("convert", "run1/00000300", out, code=2).stderr
    assert run_json("convert", "small", out, "--overwrite") == {"source": "small", "destination": out}
    assert run_json("diff", "small", out)["identical"]
    tensors = str(tmp_path / "w.safetensors")
    run("convert", "run1/00000300", tensors, "--select", "params")
    assert run_json("show", tensors)["format"] == "safetensors"


def test_report(here: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "report.html")
    rules = ["--mesh", "model=8", "--specs", "params/wte=P(None, 'model')"]
    assert run("report", "run1/00000300", "-o", output, *rules, "--histograms").stdout == f"{output}\n"
    page = Path(output).read_text(encoding="utf-8")
    specs = {"params": {"wte": PartitionSpec(None, "model")}}
    assert page == jaxckpt.report("run1/00000300", mesh={"model": 8}, specs=specs, histograms=True)
    assert f"{output} already exists: --overwrite replaces it" in run("report", "small", "-o", output, code=2).stderr
    assert run_json("report", "small", "-o", output, "--overwrite") == {"path": "small", "output": output}
    other = str(tmp_path / "report.txt")
    assert f"{other} does not end in .html" in run("report", "small", "-o", other, code=2).stderr
    assert "--specs needs --mesh" in run("report", "small", "-o", output, "--specs", "P()", code=2).stderr


def test_integrate_takes_the_four_arguments_of_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mindspore_files.tutorial(tmp_path)
    monkeypatch.chdir(tmp_path)
    printed = mindspore_files.DATA["merged"]
    for strategy, new in (("strategy.ckpt", "new"), ("strategy.json", "new.json-strategy")):
        assert run("integrate", "net.ckpt", new, strategy, "4").stdout == f"net.ckpt → {new}\n"
        merged = jaxckpt.load_numpy(new)
        expected = np.array(printed["moments.weight"], np.float32)
        np.testing.assert_array_equal(merged["moments.weight"], expected, strict=True)
        assert merged.keys() == printed.keys()
    assert "--overwrite replaces it" in run("integrate", "net.ckpt", "new", "strategy.ckpt", "4", code=2).stderr
    reported = run_json("integrate", "--overwrite", "net.ckpt", "new", "strategy.ckpt", "4")
    assert reported == {"source": "net.ckpt", "destination": "new"}


def test_integrate_without_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mindspore_files.tutorial(tmp_path)
    monkeypatch.chdir(tmp_path)
    reported = run("integrate", "net.ckpt", "new", "strategy.ckpt", "3", code=3).stderr
    assert reported.startswith(
        "jaxckpt: the shards of 'weight' do not exactly cover its shape [8, 8]:\n  [6:8, 0:8] is not in"
    )
    assert not (tmp_path / "new").exists()
    run("integrate", "net.ckpt", "new", "strategy.ckpt", "0", code=2)


def test_rm_asks(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    jaxckpt.save(path, {"w": np.zeros(3)})
    for answer in ("n\n", "\n", ""):
        asked = run("rm", path, code=1, stdin=answer).stderr
        assert f"delete {path} (jaxckpt: 1 leaf, 24 B" in asked
        assert "nothing was deleted" in asked
        assert jaxckpt.verify(path).ok
    assert run("rm", path, stdin="y\n").stdout.endswith(f"deleted {path}\n")  # click 8.1 repeats the answer before it
    assert not os.path.exists(path)


def test_rm_deletes_only_the_checkpoints_own_files(tmp_path: Path) -> None:
    path = tmp_path / "c"
    jaxckpt.save(path, {"w": np.zeros(3)})
    (path / "notes.txt").write_text("mine")
    (path / "data-raw").mkdir()
    result = run_json("rm", str(path), "--yes")
    assert result == {"path": str(path), "left": ["data-raw", "notes.txt"]}
    assert (path / "notes.txt").read_text() == "mine"
    run("rm", str(path), "--yes", code=4)


def test_rm_names_who_deletes_an_unfinished_step(here: Path) -> None:
    refused = run("rm", "run1/00000400", "--yes", code=4).stderr
    assert "a save to it is in progress or never finished" in refused
    assert refused.endswith(f". The next Checkpointer of {here}/run1 deletes it\n")
    assert Path("run1/00000400").exists()
    assert "Checkpointer" not in run("rm", "run1/logs", "--yes", code=4).stderr


def test_hints_are_commands_and_options(here: Path, tmp_path: Path) -> None:
    uneven = run("plan", "run1@300", "--mesh", "data=3", code=2).stderr
    assert uneven.endswith("give the leaf another spec, or pass --indivisible replicate to keep it whole\n")
    assert "onto 3 devices" in run("plan", "run1@300", "--mesh", "data=3", "--indivisible", "replicate").stdout
    whole = ["--mesh", "data=3", "--indivisible", "replicate"]
    run("convert", "run1@300", str(tmp_path / "converted"), *whole)
    assert jaxckpt.open(tmp_path / "converted")["params/layers/0/kernel"].spec == PartitionSpec(None, None)
    run("report", "run1@300", "-o", str(tmp_path / "r.html"), *whole)
    other = run("plan", "run1@300", "--mesh", "x=2", code=2).stderr
    assert other.endswith("pass --specs, or --specs 'P()' to replicate every leaf\n")
    with jaxckpt.Checkpointer(tmp_path / "run", background=False) as steps:
        for step in (1, 2):
            steps.save(step, {"w": np.arange(2.0)})
    path = f"{tmp_path}/run"
    run("pin", f"{path}@1", "--name", "paper")
    taken = run("pin", f"{path}@2", "--name", "paper", code=2).stderr
    assert taken.endswith(f"of {path}: pass --move, or run jaxckpt unpin {path}@paper first\n")
    Path(f"{tmp_path}/a 'run'").symlink_to(path)
    taken = run("pin", f"{tmp_path}/a 'run'@2", "--name", "paper", code=2).stderr
    assert shlex.split(taken.partition("or run jaxckpt ")[2].removesuffix(" first\n")) == [
        "unpin",
        f"{tmp_path}/a 'run'@paper",
    ]
    (file,) = (file for file in Path(path).glob("00000002/data-*/*/c/**/*") if file.is_file())
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])  # hard-linked: damages step 1 too
    hint = f"run jaxckpt verify {path}@1 for a list of all damage\n"
    for arguments in (["cat", f"{path}@1", "w"], ["convert", f"{path}@1", str(tmp_path / "out.npz")]):
        assert run(*arguments, code=3).stderr.endswith(hint)
    compared = run("diff", "small", f"{path}", "--select", "w", code=3).stderr
    assert compared.endswith(f"run jaxckpt verify {path} for a list of all damage\n")
    with jaxckpt.Checkpointer(path, background=False) as steps:
        steps.save(3, {"w": np.ones(2)})
    for arguments in (["diff"], ["average", "-o", str(tmp_path / "sum")]):
        assert run(*arguments, path, f"{path}@1", code=3).stderr.endswith(hint)


def test_rm_refuses_a_pinned_step(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run") as steps:
        for step in (1, 2):
            steps.save(step, {"w": np.full(3, step)})
    jaxckpt.Run(tmp_path / "run").pin(1, "paper")
    for path in ("run@paper", "run@1", "run/00000001"):
        refused = run("rm", str(tmp_path / path), "--yes", code=2).stderr
        assert "is pinned as 'paper', and is not deleted: unpin it first" in refused
    run("unpin", str(tmp_path / "run@paper"))
    run("rm", str(tmp_path / "run@1"), "--yes")
    assert jaxckpt.Run(tmp_path / "run").steps() == [2]


def test_rm_deletes_the_metrics_that_were_added_to_a_step(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run") as steps:
        for step in (1, 2):
            steps.save(step, {"w": np.full(3, step)})
            steps.add_metrics(step, {"accuracy": 0.5, "loss": 1})
    run("rm", str(tmp_path / "run@1"), "--yes")
    assert {path.name[:15] for path in (tmp_path / "run" / "_run").glob("metric-*")} == {"metric-00000002"}
    assert jaxckpt.Run(tmp_path / "run").metrics(2) == {"accuracy": 0.5, "loss": 1}


def test_rm_reports_data_that_it_could_not_delete(tmp_path: Path) -> None:
    path = tmp_path / "c"
    jaxckpt.save(path, {"w": np.zeros(3)})
    (data,) = path.glob("data-*")
    with (data / "writer.json").open("w") as note:  # like a live writer, so that the data cannot be deleted
        fcntl.flock(note, fcntl.LOCK_EX)
        assert f"{data.name} in it could not be deleted" in run("rm", str(path), "--yes", code=5).stderr
    assert os.listdir(path) == [data.name]


def test_rm_of_a_link_deletes_only_the_link(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "theirs") as theirs:
        for step in (1, 2):
            theirs.save(step, {"w": np.full(3, step)})
    (tmp_path / "ours").mkdir()
    for step in (1, 2):
        (tmp_path / f"ours/{step:08d}").symlink_to(f"../theirs/{step:08d}")
    link = str(tmp_path / "ours/00000001")
    assert f"delete the link {link} (jaxckpt: 1 leaf" in run("rm", link, code=1, stdin="n\n").stderr
    assert run("rm", link, "--yes").stdout == f"deleted the link {link}\n"
    assert run_json("rm", str(tmp_path / "ours@2"), "--yes")["left"] == []
    assert os.listdir(tmp_path / "ours") == []
    assert jaxckpt.Run(tmp_path / "theirs").steps() == [1, 2]
    assert jaxckpt.verify(tmp_path / "theirs").ok


def test_rm_refuses_other_paths(here: Path, tmp_path: Path) -> None:
    reported = run("rm", "run1/exported.safetensors", "--yes", code=2).stderr
    assert reported == "jaxckpt: " + os.path.abspath("run1/exported.safetensors") + (
        " is a checkpoint of format safetensors; rm deletes only jaxckpt's own\n"
    )
    run("rm", "run1", "--yes", code=2)
    run("rm", "empty", "--yes", code=4)
    run("rm", "run1/00000500", "--yes", code=3)
    assert len(run_json("ls", "run1")["checkpoints"]) == 6


def test_steps_on_an_object_store(bucket: servers.Bucket) -> None:
    """The URL's settings come from the environment. `rm` also removes the step from the Checkpointer's list."""
    url = f"{bucket.url}/run"
    with jaxckpt.Checkpointer(url, background=False) as steps:
        for step in (1, 2):
            steps.save(step, {"w": np.full(3, step)}, metrics={"loss": step})
        assert [entry["step"] for entry in run_json("ls", url)["checkpoints"]] == [1, 2]
        assert run("cat", f"{url}/00000002", "w[1]").stdout == "2\n"
        run("rm", f"{url}/00000002", "--yes")
        assert steps.steps() == [1]
    assert [entry["name"] for entry in run_json("ls", url)["checkpoints"]] == ["00000001"]
    assert set(store_at(url, Options()).folders()) == {"00000001"}
    run("ls", f"{bucket.url}/nothing", code=4)


# Exit codes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["show", "small"], 0),
        (["verify", "run1/00000500"], 1),
        (["diff", "small", "other"], 1),
        (["show"], 2),
        (["show", "small", "--nonsense"], 2),
        (["show", "small", "--select", "nothing"], 2),
        (["show", "run1/00000500"], 3),
        (["ls", "run1/00000500"], 0),
        (["show", "nowhere"], 4),
        (["ls", "nowhere"], 4),
        (["ls", "empty"], 4),
        (["verify", "nowhere"], 4),
        (["diff", "small", "nowhere"], 4),
        (["show", "small", "--json", "--depth", "1"], 2),
        (["show", "n" * 300], 5),
        (["cat", "small", "w", "--save", "nowhere/w.npy"], 5),
    ],
)
def test_exit_codes(here: Path, args: list[str], code: int) -> None:
    result = run(*args, code=code)
    if code > 1:
        assert not result.stdout
        assert result.stderr
        assert "Traceback" not in result.stderr


@contextlib.contextmanager
def extra_command(error: BaseException) -> Iterator[str]:
    """A command that fails in a way that no other should."""

    @main.command("broken")
    def broken() -> None:
        raise error

    try:
        yield "broken"
    finally:
        del main.commands["broken"]


def test_an_unexpected_error_is_reported_as_a_bug() -> None:
    with extra_command(RuntimeError("oh")) as name:
        assert (
            run(name, code=70).stderr == "jaxckpt: unexpected RuntimeError: oh\nThis is a bug; --debug shows where.\n"
        )


def test_debug_shows_the_traceback(here: Path) -> None:
    for args in (("--debug", "show", "nowhere"), ("show", "nowhere", "--debug")):
        errors = run(*args, code=4).stderr
        assert "Traceback (most recent call last)" in errors
        assert "load_manifest.py" in errors
        assert (
            errors.splitlines()[-1]
            == "jaxckpt: nowhere is not a checkpoint: the path does not exist, or the folder is empty"
        )


def test_exit_codes_are_documented() -> None:
    documented = set(re.findall(r"^  (?:\s*)(\d+)\s", run("--help").stdout, re.MULTILINE))
    assert documented == {"0", "1", "2", "3", "4", "5", "6", "70", "130", "141"}
    page = (ROOT / "docs/command-line.md").read_text()
    assert set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE)) == documented


def test_an_interrupt_during_work() -> None:
    with extra_command(KeyboardInterrupt()) as name:
        run(name, code=130)


@pytest.mark.child
def test_an_interrupt_at_the_prompt(here: Path) -> None:
    with command("rm", "small", stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        guard = threading.Timer(TIMEOUT, child.kill)
        guard.start()
        asked = ""
        while not asked.endswith(": "):
            letter = child.stderr.read(1)
            assert letter, asked
            asked += letter
        time.sleep(0.2)  # until it waits for the answer
        child.send_signal(signal.SIGINT)
        assert child.wait(TIMEOUT) == 130
        guard.cancel()
    assert jaxckpt.verify("small").ok


@pytest.mark.child
def test_a_closed_pipe(here: Path) -> None:
    child = command("show", "run1/00000300", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    child.stdout = None
    _, reported = child.communicate(timeout=TIMEOUT)
    assert (child.returncode, reported) == (141, "")


# Processes ------------------------------------------------------------------------------------------------


@pytest.mark.child
def test_no_command_starts_a_backend(here: Path, tmp_path: Path) -> None:
    """JAX_PLATFORMS names a platform that does not exist, so any request for a device fails."""
    commands = [
        ["ls", "run1"],
        ["show", "run1/00000300"],
        ["cat", "run1/00000300", "params/wte[0]"],
        ["cat", "run1/00000300", "rng"],
        ["verify", "run1/00000300"],
        ["diff", "run1/00000300", "run1/00000300"],
        ["plan", "run1/00000300", "--mesh", "data=2,model=2", "--specs", "params/wte=P('data')"],
        ["plan", "small", "--mesh", "data=2,model=2"],
        ["convert", "run1/00000300", str(tmp_path / "a"), "--mesh", "model=2", "--chunk-bytes", "4KiB"],
        ["convert", "run1/00000300", str(tmp_path / "b.safetensors"), "--select", "params"],
        ["average", "run1@200", "run1@300", "--select", "params", "-o", str(tmp_path / "d")],
        ["report", "run1/00000300", "-o", str(tmp_path / "c.html"), "--mesh", "model=2", "--histograms"],
        ["pin", "run1@300", "--name", "kept"],
        ["unpin", "run1@kept"],
        ["fork", "run1@300", str(tmp_path / "forked")],
        ["repair", "run1/00000300"],
        ["rm", str(tmp_path / "a"), "--yes"],
    ]
    assert {command[0] for command in commands} >= main.commands.keys() - {"integrate"}
    program = f"""
from jaxckpt._cli.main import main
for args in {commands!r}:
    assert not main(args, prog_name="jaxckpt", standalone_mode=False), args
import jax
try:
    jax.devices()
except RuntimeError:
    print("no backend exists")
"""
    env = {**processes.environment(1), "JAX_PLATFORMS": "absent"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, text=True, capture_output=True, timeout=TIMEOUT, check=False
    )
    assert done.stdout.endswith("no backend exists\n"), done.stdout + done.stderr


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ck", {"w": np.zeros(1 << 20)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        done = run("cat", str(tmp_path / "ck"), "w", "--save", str(tmp_path / "w.npy"), code=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert str(tmp_path / "w.npy") in done.stderr
    assert os.listdir(tmp_path) == ["ck"]


@pytest.mark.child
def test_python_m_jaxckpt_in_a_pipe_is_plain(here: Path) -> None:
    with command("show", "run1/00000300", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        shown, reported = child.communicate(timeout=TIMEOUT)
    assert (child.returncode, reported) == (0, "")
    assert "\x1b" not in shown
    assert "params/" in shown


@pytest.mark.child
def test_color_and_a_bar_only_on_terminals(here: Path) -> None:
    """On a pseudo-terminal of 70 columns."""
    for args, title in (
        (["verify", "small"], "  verify "),
        (["cat", "small", "w", "--save", "w.npy", "--overwrite"], "     cat "),
    ):
        assert title in on_terminal(args)
        assert title not in on_terminal([*args, "--no-progress"])
    for extra, colored in (({}, True), ({"NO_COLOR": "1"}, False)):
        shown = on_terminal(["show", "run1/00000300"], **extra)
        assert ("\x1b[1m" in shown) == colored
        assert max(map(len, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).split("\r\n"))) <= 70


def on_terminal(args: list[str], **extra: str) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 70, 0, 0))
    env = {**processes.environment(1), "JAX_PLATFORMS": "absent", "TERM": "xterm", **extra}
    child = subprocess.Popen([sys.executable, "-m", "jaxckpt", *args], env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    guard = threading.Timer(TIMEOUT, child.kill)
    guard.start()
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the process has ended
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert child.wait(TIMEOUT) == 0
    guard.cancel()
    return shown.decode()


# The page -------------------------------------------------------------------------------------------------


def commands_of(page: str) -> list[tuple[str, str]]:
    """(command line, its output on the page) of every `$` line in the page's console blocks."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = re.sub(r" \\\n +", " ", part).partition("\n")
            found.append((line, shown))
    return found


@pytest.mark.child
def test_the_output_on_the_page_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/command-line.md").read_text()
    (setup,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    env = {**processes.environment(8), "COLUMNS": "100", "PYTHON": sys.executable}
    subprocess.run([sys.executable, "-c", setup], cwd=tmp_path, env=env, timeout=TIMEOUT, check=True)
    commands = commands_of(page)
    assert {line.split()[1] for line, _ in commands if line.startswith("jaxckpt ")} >= main.commands.keys() - {
        "integrate"
    }
    monkeypatch.chdir(tmp_path)
    for line, expected in commands:
        code, output = run_line(line, env)
        assert code in (0, 1), f"{line}\n{output}"
        if expected:
            assert words(output) == words(expected), line


def run_line(line: str, env: dict[str, str]) -> tuple[int, str]:
    """Run a command line, in a shell if it needs one; returns (exit code, stdout)."""
    name, *args = shlex.split(line)
    if name == "jaxckpt" and "|" not in args:
        result = runner(env["COLUMNS"]).invoke(main, args, prog_name="jaxckpt")
        return result.exit_code, result.stdout
    shell = 'jaxckpt() { "$PYTHON" -m jaxckpt "$@"; }\n'
    done = subprocess.run(
        ["bash", "-c", shell + line], env=env, text=True, stdout=subprocess.PIPE, timeout=TIMEOUT, check=False
    )
    return done.returncode, done.stdout


def words(text: str) -> list[list[str]]:
    """Without ages, which have one or two digits, and without the spaces next to them."""
    return [re.sub(r"\b\d+ (s|min)\b", "AGE", line).split() for line in text.splitlines()]


def test_every_key_of_json_is_on_the_page(here: Path) -> None:
    page = (ROOT / "docs/command-line.md").read_text()
    documented = set(re.findall(r"`([a-z_]+)`", page))

    def keys(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(keys, value))
        if not isinstance(value, dict):
            return set()
        # The keys below these are the user's, or names of axes, devices, libraries and phases.
        free = {"metrics", "mesh", "libraries", "device_bytes", "metadata", "phase_seconds"}
        return set(value) | set().union(*(keys(item) for name, item in value.items() if name not in free))

    found: set[str] = set()
    for args in (["ls", "run1"], ["show", "small"], ["cat", "small", "w"], ["verify", "run1/00000500"],
                 ["diff", "small", "other"], ["plan", "small", "--mesh", "x=1"]):  # fmt: skip
        found |= keys(json.loads(runner().invoke(main, [*args, "--json"]).stdout))
    assert found <= documented, found - documented
    assert len(found) > 35


def test_every_option_is_on_the_page() -> None:
    page = (ROOT / "docs/command-line.md").read_text()
    for name, found in main.commands.items():
        assert f"jaxckpt {name}" in page
        for parameter in found.params:
            if isinstance(parameter, click.Option):
                assert re.search(rf"[ `]{parameter.opts[0]}\b", page), (name, parameter.opts)


def test_closed_streams_do_not_fail_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "ours", {"w": np.ones(2)})
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    for arguments in (["show", "ours"], ["convert", "ours", "copy"]):
        with contextlib.chdir(tmp_path), pytest.raises(SystemExit) as ended:
            main(arguments, prog_name="jaxckpt")
        assert ended.value.code == 0
    sys.stdout.close()
    sys.stderr.close()


def test_a_report_is_never_written_into_the_checkpoint(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ours", {"w": np.ones(2)})
    (tmp_path / "link.html").symlink_to(tmp_path / "ours/manifest.json")
    for output in ("ours/manifest.json", "ours/r.html", "link.html"):
        shown = run("report", str(tmp_path / "ours"), "-o", str(tmp_path / output), code=2)
        assert "is in the checkpoint" in shown.stderr
    assert jaxckpt.load_numpy(tmp_path / "ours")["w"].tolist() == [1, 1]
    assert os.listdir(tmp_path / "ours").count("r.html") == 0
    shown = run("report", str(tmp_path / "ours"), "-o", str(tmp_path / "nowhere/r.html"), code=5)
    assert shown.stderr.endswith(f"No such file or directory: '{tmp_path}/nowhere/r.html'\n")


def test_a_runs_directory_and_its_named_steps(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    with jaxckpt.Checkpointer(path, keep_last=1) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, {"w": np.full(3, step)})
            checkpoints.wait()
            if step == 10:
                assert run("pin", f"{path}@10", "--name", "paper").stdout == f"{path}@paper is step 10\n"
    assert [entry["step"] for entry in run_json("ls", path)["checkpoints"]] == [10, 20]
    assert "step 20" in run("show", path).stdout
    assert "step 10" in run("show", f"{path}@paper").stdout
    assert run("verify", path).stdout.startswith(f"{path}: 2 leaves in 2 objects")
    assert "is the directory of a run: name the step to delete" in run("rm", path, "--yes", code=2).stderr
    with contextlib.chdir(path):
        assert run("pin", "00000010", "--name", "figure").stdout == ".@figure is step 10\n"
        run("unpin", ".@figure")
    with contextlib.chdir(tmp_path):
        Path("20260102").symlink_to(path)
        assert run("pin", "20260102", "--name", "figure").stdout == "20260102@figure is step 20\n"
        run("unpin", "20260102@figure")
    for unnamed in (path, f"{path}@", f"{path}/"):
        message = run("unpin", unnamed, code=2).stderr
        assert message.endswith(f"has no name of a pin: give RUN@NAME, as in {path}@paper; pinned names: paper\n")
    assert run("unpin", f"{path}@paper").stdout == f"{path}@paper is no longer pinned\n"
    assert "pinned names: none" in run("unpin", f"{path}@paper", code=4).stderr
    run("rm", f"{path}@10", "--yes")
    assert jaxckpt.Run(path).steps() == [20]


def test_messages_name_the_options_of_the_command_line(here: Path) -> None:
    message = run("convert", "run1/00000300", "weights.npz", code=2).stderr
    assert "leave them out with --select, or rename them with --rename:" in message
    message = run("convert", "run1/00000300", "weights.pt", code=2).stderr
    assert "pass --format with one of" in message
    assert "select=" not in message
