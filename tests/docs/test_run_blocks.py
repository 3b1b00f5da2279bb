"""The runner of the docs' Python blocks: it must not skip a block silently or hide a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.child

RUNNER = Path(__file__).parents[2] / "docs" / "run_blocks.py"


def run(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    return subprocess.run(
        [sys.executable, RUNNER, path], capture_output=True, text=True, timeout=60, check=False, cwd=path.parent
    )


def test_blocks_share_a_namespace_and_leave_no_files(tmp_path: Path) -> None:
    done = run(
        tmp_path / "a.md",
        "```python\na = 1\nopen('left', 'w').close()\n```\ntext\n```json\n{]\n```\n\n```python\nassert a == 1\n```\n",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 blocks to run, 0 skipped" in done.stdout
    assert not (tmp_path / "left").exists()


def test_a_failure_names_the_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    done = run(path, '# title\n```python\na = 1\n```\n\n```python\n\nraise ValueError(f"{a}")\n```\n')
    assert done.returncode == 1
    assert f'File "{path}", line 8' in done.stderr
    assert "ValueError: 1" in done.stderr


def test_a_block_is_skipped_for_a_reason_and_counted(tmp_path: Path) -> None:
    done = run(
        tmp_path / "a.md",
        "<!-- not run: needs a cluster -->\n\n```python\nboom()\n```\n```python\na = 1\n```\n",
    )
    assert done.returncode == 0, done.stderr
    assert "1 blocks to run, 1 skipped" in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "<!-- not run: -->\n```python\nboom()\n```\n",  # no reason
        "<!-- not run: text between -->\ntext\n```python\nboom()\n```\n",
        '```py title="other.py"\nboom()\n```\n',
        "1. one\n\n   ```python\n   boom()\n   ```\n",
        "````python\n'''\n```\n'''\nboom()\n````\n",
        "~~~python\nboom()\n~~~\n",
    ],
)
def test_every_other_block_runs(tmp_path: Path, text: str) -> None:
    assert "NameError: name 'boom' is not defined" in run(tmp_path / "a.md", text).stderr


def test_a_block_that_is_never_closed_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path / "a.md", "text\n```python\na = 1\n")
    assert done.returncode == 1
    assert "a.md:2: this block is never closed" in done.stderr


def test_each_of_several_files_gets_a_fresh_interpreter(tmp_path: Path) -> None:
    page = """```python
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={devices}"
import atexit, jax
assert jax.device_count() == {devices} and not os.listdir()
sys.seen = getattr(sys, "seen", 0) + 1
assert sys.seen == 1
open("left", "w").close()
atexit.register(print, "the end")
{last}
```
"""
    paths = [tmp_path / f"{name}.md" for name in "abc"]
    for devices, path in enumerate(paths, 2):
        path.write_text(page.format(devices=devices, last="1 / 0" if path.stem == "b" else ""))
    done = subprocess.run(
        [sys.executable, RUNNER, *paths], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    assert [line.split("/")[-1] for line in done.stdout.splitlines()] == [
        f"{path.name}: 1 blocks to run, 0 skipped" for path in paths
    ]
    assert done.stderr.count("FAILED") == done.stderr.count("the end") == 1
    assert f'File "{paths[1]}", line 10' in done.stderr
    assert not (tmp_path / "left").exists()
