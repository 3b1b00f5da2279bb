"""Imports at the start of a process: each module when it is needed, and JAX only where arrays are on devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import processes
import pytest

import jaxckpt

TIMEOUT = 120
HEAVY = {"jax", "jaxlib", "numpy", "tensorstore", "ml_dtypes", "msgspec", "rich"}
COMPLETE = {"_JAXCKPT_COMPLETE": "bash_complete"}

pytestmark = pytest.mark.child


def start(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**processes.environment(1), **more}
    return subprocess.run(
        [sys.executable, *command], env=env, text=True, capture_output=True, timeout=TIMEOUT, check=False
    )


def completion(*words: str) -> dict[str, str]:
    return {**COMPLETE, "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}


def imported_by(*command: str, **env: str) -> tuple[set[str], str]:
    """The modules that a command imports, and its output."""
    done = start(*command, PYTHONPROFILEIMPORTTIME="1", **env)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"\|\s+(\w+)$", done.stderr, re.MULTILINE)), done.stdout


@pytest.mark.parametrize(
    ("args", "env", "printed"),
    [
        (["--version"], {}, f"jaxckpt, version {jaxckpt.__version__}"),
        (["convert", "--help"], {}, "--chunk-bytes"),
        ([], completion("jaxckpt", "show", "run1/"), "file,run1/"),
        ([], completion("jaxckpt", "show", "--de"), "plain,--depth"),
        ([], completion("jaxckpt", "convert", "--format", "s"), "plain,safetensors"),
    ],
    ids=["version", "help", "path", "option", "format"],
)
def test_commands_that_read_no_checkpoint_import_no_large_library(
    here: Path, args: list[str], env: dict[str, str], printed: str
) -> None:
    imported, output = imported_by("-m", "jaxckpt", *args, **env)
    assert printed in output
    assert "click" in imported
    assert not imported & HEAVY


@pytest.mark.parametrize(
    ("args", "env", "printed"),
    [
        (["show", "run1/00000300"], {}, "step 300"),
        (["ls", "run1"], {}, "00000300"),
        (["verify", "--quick", "run1/00000300"], {}, "ok"),
        (["cat", "run1/00000300", "step"], {}, "300"),
        ([], completion("jaxckpt", "cat", "run1/00000300", "params/l"), "plain,params/layers/"),
        ([], completion("jaxckpt", "show", "run1/00000300", "--select", "opt"), "plain,opt_state/"),
    ],
    ids=["show", "ls", "verify", "cat", "leaf", "select"],
)
def test_commands_that_only_read_do_not_import_jax(
    here: Path, args: list[str], env: dict[str, str], printed: str
) -> None:
    imported, output = imported_by("-m", "jaxckpt", *args, **env)
    assert printed in output
    assert "numpy" in imported
    assert not imported & {"jax", "jaxlib", "orbax"}


def test_checkpoints_of_other_libraries_are_read_and_completed() -> None:
    """In a separate process, because other tests of the command line have imported all formats."""
    llama = os.fspath(Path(__file__).parents[1] / "data" / "transformers" / "llama")
    done = start("-m", "jaxckpt", "cat", llama, "model.norm.weight[0:2]")
    assert (done.returncode, done.stdout) == (0, "[0.7632692, 1.0248005]\n"), done.stderr
    done = start("-m", "jaxckpt", **completion("jaxckpt", "cat", llama, "model.nor"))
    assert "plain,model.norm.weight" in done.stdout, done.stderr


def test_the_package_imports_a_module_when_one_of_its_names_is_used(tmp_path: Path) -> None:
    program = f"""
import sys
import jaxckpt
assert not sys.modules.keys() & {sorted(HEAVY)}
assert {{*dir(jaxckpt)}} == {{*jaxckpt.__all__, *jaxckpt._PUBLIC_MODULES}} and not hasattr(jaxckpt, "opne")
from jaxckpt import *
assert all(getattr(jaxckpt, name) is globals()[name] for name in jaxckpt.__all__)
import numpy as np
save({os.fspath(tmp_path / "c")!r}, {{"x": np.arange(3)}})
print("saved")
"""
    assert imported_by("-c", program)[1] == "saved\n"
    assert jaxckpt.verify(tmp_path / "c").ok


def test_numpy_arrays_are_read_without_jax(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"x": np.arange(3)})
    program = f"import jaxckpt; print(jaxckpt.open({os.fspath(tmp_path / 'c')!r})['x'][1:])"
    imported, output = imported_by("-c", program)
    assert output == "[1 2]\n"
    assert not imported & {"jax", "jaxlib", "orbax"}


def test_threads_may_use_the_first_names_at_the_same_time(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"x": np.arange(3)})
    program = f"""
import sys, threading
sys.setswitchinterval(1e-6)
import jaxckpt
calls = [lambda name=name: getattr(jaxckpt, name) for name in (*jaxckpt.__all__, "errors", "weights")]
failed = []
def run(call):
    try:
        call()
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=run, args=(call,)) for call in calls]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(failed, jaxckpt.load_numpy({os.fspath(tmp_path / "c")!r})["x"].tolist())
"""
    assert imported_by("-c", program)[1] == "[] [0, 1, 2]\n"
