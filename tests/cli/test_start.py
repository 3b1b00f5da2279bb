"""Imports at the start of a process: few modules for the command line, everything for other programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    ("args", "env", "printed"),
    [
        (["--version"], {}, f"jaxckpt, version {jaxckpt.__version__}"),
        (["convert", "--help"], {}, "--chunk-bytes"),
        ([], completion("jaxckpt", "show", "run1/"), "file,run1/"),
        ([], completion("jaxckpt", "show", "--de"), "plain,--depth"),
        ([], completion("jaxckpt", "convert", "--format", "s"), "plain,safetensors"),
        ([], completion("jaxckpt", "cat", "run1/00000300", "params/l"), "plain,params/layers/"),
        ([], completion("jaxckpt", "show", "run1/00000300", "--select", "opt"), "plain,opt_state/"),
    ],
    ids=["version", "help", "path", "option", "format", "leaf", "select"],
)
def test_commands_that_read_no_checkpoint_do_not_import_jax(
    here: Path, args: list[str], env: dict[str, str], printed: str
) -> None:
    done = start("-m", "jaxckpt", *args, PYTHONPROFILEIMPORTTIME="1", **env)
    assert printed in done.stdout
    imported = set(re.findall(r"\|\s+(\w+)$", done.stderr, re.MULTILINE))
    assert "click" in imported
    assert not imported & HEAVY


def test_checkpoints_of_other_libraries_are_read_and_completed() -> None:
    """In a separate process, because other tests of the command line have imported all formats."""
    llama = os.fspath(Path(__file__).parents[1] / "data" / "transformers" / "llama")
    done = start("-m", "jaxckpt", "cat", llama, "model.norm.weight[0:2]")
    assert (done.returncode, done.stdout) == (0, "[0.7632692, 1.0248005]\n"), done.stderr
    done = start("-m", "jaxckpt", **completion("jaxckpt", "cat", llama, "model.nor"))
    assert "plain,model.norm.weight" in done.stdout, done.stderr


def test_other_programs_import_everything_at_once() -> None:
    """So that the program's exit functions run before those of JAX and jaxckpt, which shut down what they use."""
    program = """
import atexit, sys
import jaxckpt
assert "jax" in sys.modules and "jaxckpt._save.background" in sys.modules
def last():
    print(float(state.sum()))
atexit.register(last)
import jax
state = jax.numpy.ones(3)
"""
    done = start("-c", program)
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr


def test_another_program_of_the_same_name_has_every_public_name(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "jaxckpt"
    program.parent.mkdir()
    program.write_text(
        "import jaxckpt, os, sys\n"
        "assert 'jax' not in sys.modules and not hasattr(jaxckpt, 'opne')\n"
        "from jaxckpt import *\n"
        "import numpy as np\n"
        f"save({os.fspath(tmp_path / 'c')!r}, {{'x': np.arange(3)}})\n"
        "print(open.__module__, all(getattr(jaxckpt, name) is globals()[name] for name in jaxckpt.__all__))\n"
    )
    done = start(os.fspath(program))
    assert (done.returncode, done.stdout) == (0, "jaxckpt True\n"), done.stderr
    assert jaxckpt.verify(tmp_path / "c").ok
