"""Records that several threads decode at the same time, in a new process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest

import jaxckpt

FIRST_READS = """
import sys, threading
from pathlib import Path
from jaxckpt._model import manifest

content = Path(sys.argv[1]).read_bytes()
sys.setswitchinterval(1e-6)
barrier = threading.Barrier(8)
results = []

def read():
    barrier.wait()
    results.append(manifest.decode(content, "here").leaves)

threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(results) == 8 and all(result == results[0] for result in results)
"""


@pytest.mark.child
def test_the_first_manifests_of_a_process_are_decoded_by_several_threads(tmp_path: Path) -> None:
    """msgspec alone crashes the process in most runs of this program."""
    jaxckpt.save(tmp_path / "c", {"step": 3, "nested": {"rate": 0.5}})
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_READS, str(tmp_path / "c" / "manifest.json")],
            env=processes.environment(1), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_every_decoding_goes_through_typed_json() -> None:
    package = Path(jaxckpt.__file__).parent
    direct = re.compile(r"msgspec\.(convert|json\.Decoder|json\.decode\(.*type=)")
    found = {
        file.name
        for file in package.rglob("*.py")
        if direct.search(file.read_text()) and "import msgspec" in file.read_text()
    }
    assert found == {"typed_json.py"}
