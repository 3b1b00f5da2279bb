"""Type hints as a user's project sees them, by mypy and by pyright."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.child

ROOT = Path(__file__).parent.parent
USER = "tests/typing/user_project.py"

CHECKERS = {
    # JAX is not this test's to judge: PartitionSpec, for one, has no hints.
    "mypy": ["mypy", "--strict", "--allow-untyped-calls", "--follow-imports=silent", "--cache-dir={cache}", USER],
    "basedpyright": ["basedpyright", "--pythonpath", sys.executable, "--project={cache}/pyrightconfig.json"],
}
WRONG = "jaxckpt.save('a', {}, overwrite='yes')\njaxckpt.opne('a')\n"


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_project_passes_and_a_mistake_does_not(tmp_path: Path, checker: str) -> None:
    pytest.importorskip(checker)
    user = (ROOT / USER).read_text()
    done = checked(checker, tmp_path / "right", user)
    assert done.returncode == 0, done.stdout + done.stderr
    done = checked(checker, tmp_path / "wrong", "import jaxckpt\n" + WRONG)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "overwrite" in done.stdout
    assert "opne" in done.stdout


def checked(checker: str, folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "user_project.py").write_text(source)
    (folder / "pyrightconfig.json").write_text(
        f'{{"include": ["user_project.py"], "extraPaths": ["{ROOT}"], "typeCheckingMode": "standard"}}'
    )
    command = [part.format(cache=folder).replace(USER, str(folder / "user_project.py")) for part in CHECKERS[checker]]
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
