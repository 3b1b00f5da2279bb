"""The runner of notebooks: it must not hide an error or a changed output."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.child

# Not imported here, because every worker collects this module, and the import takes a second.
for _name in ("nbformat", "nbclient", "ipykernel"):
    if importlib.util.find_spec(_name) is None:
        pytest.skip(f"{_name} is not installed", allow_module_level=True)

RUNNER = Path(__file__).parents[2] / "docs" / "run_notebooks.py"
CELL = """
import datetime, tempfile, uuid
print(tempfile.mkdtemp(), datetime.datetime.now(datetime.UTC).isoformat(), uuid.uuid4().hex)
1 + 1
"""


def run(path: Path, *arguments: str, cells: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    if cells is not None:
        import nbformat

        v4 = nbformat.v4
        nbformat.write(
            v4.new_notebook(cells=[v4.new_code_cell(cell, id=f"c{n}") for n, cell in enumerate(cells)]), path
        )
    return subprocess.run(
        [sys.executable, RUNNER, *arguments, path], capture_output=True, text=True, timeout=120, check=False
    )


def test_stored_outputs_are_current_except_for_times_ids_and_folders(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    done = run(path, "--store", cells=[CELL])
    assert done.returncode == 0, done.stderr  # libzmq may print a warning of its own when the kernel ends
    stored = path.read_text()
    assert run(path).returncode == 0
    assert path.read_text() == stored
    path.write_text(stored.replace('"2"', '"3"'))
    done = run(path)
    assert done.returncode == 1
    assert "\n-3\n+2\n" in done.stderr


def test_a_cell_that_raises_is_a_failure_even_when_storing(tmp_path: Path) -> None:
    done = run(tmp_path / "a.ipynb", "--store", cells=["1", "raise ValueError('no')", "print('behind')"])
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    assert "outputs" in (tmp_path / "a.ipynb").read_text()
    assert "behind\\n" not in (tmp_path / "a.ipynb").read_text()
