"""Run the Python blocks of Markdown files, so that what the docs show is what happens.

The ```python blocks of one file run in order, in one namespace, in an empty working folder, on 8 simulated devices.
A block after `<!-- not run: reason -->` is skipped, and counted.

    python docs/run_blocks.py README.md docs/*.md
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

_BLOCK = re.compile(r"(<!-- not run: [^>]*-->\s*\n)?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TIMEOUT_SECONDS = 300


def program(path: Path) -> tuple[str, int, int]:
    """A file's blocks as one program on their own lines, how many there are, and how many are skipped."""
    text = path.read_text()
    lines = [""] * (text.count("\n") + 1)
    run = skipped = 0
    for block in _BLOCK.finditer(text):
        if block.group(1):
            skipped += 1
            continue
        run += 1
        first = text.count("\n", 0, block.start(2))
        for offset, line in enumerate(block.group(2).splitlines()):
            lines[first + offset] = line
    return "\n".join(lines), run, skipped


def main(names: list[str]) -> int:
    failed = 0
    for name in names:
        path = Path(name).resolve()
        code, run, skipped = program(path)
        if not run:
            continue
        with tempfile.TemporaryDirectory() as folder:
            # Compiled under the Markdown file's own name, so a traceback points at its lines.
            runner = "import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'), {'__name__': '__main__'})"
            done = subprocess.run(
                [sys.executable, "-c", runner, str(path)],
                input=code,
                text=True,
                capture_output=True,
                cwd=folder,
                timeout=_TIMEOUT_SECONDS,
                env={
                    **os.environ,
                    "JAX_PLATFORMS": "cpu",
                    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                },
                check=False,
            )
        print(f"{name}: {run} blocks run, {skipped} skipped{'' if done.returncode == 0 else ': FAILED'}")
        if done.returncode:
            failed += 1
            print(done.stdout + done.stderr, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
