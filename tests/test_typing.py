"""Type hints as a user's project sees them, by mypy and by pyright."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.child

ROOT = Path(__file__).parent.parent
USER = "tests/typing/user_project.py"
FILES = ("{folder}/user_project.py", "{folder}/wrong.py")

CHECKERS = {
    "mypy": ["mypy", "--config-file={folder}/mypy.ini", "--cache-dir={folder}", *FILES],
    "basedpyright": ["basedpyright", "--pythonpath", sys.executable, "--project={folder}/pyrightconfig.json"],
}
# Errors in JAX do not count: PartitionSpec, for example, has no hints. Reading JAX's modules would take mypy 20 s.
MYPY = """
[mypy]
strict = True
disallow_untyped_calls = False
follow_imports = silent
[mypy-jax._src.*,jax.experimental.*,orbax.*,tensorstore.*,rich.*,click.*]
follow_imports = skip
[mypy-jax._src.core,jax._src.sharding,jax._src.partition_spec,jax._src.basearray]
follow_imports = silent
"""
WRONG = """
jaxckpt.save('a', {}, overwrite='yes')
jaxckpt.opne('a')
trained: list[int] = jaxckpt.restore('a', {1.5})
jaxckpt.restore('a', mesh=None, tide=True)
"""


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_project_passes_and_a_mistake_does_not(tmp_path: Path, checker: str) -> None:
    pytest.importorskip(checker)
    (tmp_path / "user_project.py").write_text((ROOT / USER).read_text())
    (tmp_path / "wrong.py").write_text("import jaxckpt\n" + WRONG)
    (tmp_path / "mypy.ini").write_text(MYPY)
    (tmp_path / "pyrightconfig.json").write_text(
        f'{{"include": ["*.py"], "extraPaths": ["{ROOT}"], "typeCheckingMode": "standard"}}'
    )
    # Check both files in one run, because most of its time is spent on imports.
    command = [sys.executable, "-m", *(part.format(folder=tmp_path) for part in CHECKERS[checker])]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=240, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "user_project.py" not in done.stdout, done.stdout
    assert "overwrite" in done.stdout
    assert "opne" in done.stdout
    assert all(f"wrong.py:{line}:" in done.stdout for line in (3, 4, 5, 6)), done.stdout
