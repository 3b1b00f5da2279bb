"""Run the Python blocks of Markdown files, so that what the docs show is what happens.

The ```python blocks of one file run in order, in one namespace, in an empty working folder, as if a reader pasted them
into an interpreter: a page that needs 8 simulated devices sets them up itself. A block after `<!-- not run: reason -->`
is skipped, and counted.

    python docs/run_blocks.py README.md docs/*.md
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"(?P<indent>\s*)(?P<fence>```+|~~~+)\s*(?P<language>\w*)[^`]*$")
_NOT_RUN = re.compile(r"\s*<!-- not run: \S.*-->\s*$")
_TIMEOUT_SECONDS = 300

# Compiled under the Markdown file's own name, so a traceback points at its lines.
_RUNNER = "import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'), {'__name__': '__main__'})"


@dataclass(frozen=True, slots=True)
class Program:
    """The blocks of one file."""

    code: str
    """All blocks to run. Each line has the same line number as in the file."""
    run: int
    skipped: int


def program_of(path: Path) -> Program:
    """The blocks of a file as one program. An unclosed block is an error, because nothing after it would be tested."""
    lines: list[str] = []
    run = skipped = 0
    inside: re.Match[str] | None = None  # the line that opened the block
    skip = python = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code = ""
        if inside is not None:
            if line.strip().startswith(inside["fence"]) and not line.strip(" `~"):
                inside, skip = None, False
            elif python and not skip:
                code = line.removeprefix(inside["indent"])
        elif inside := _FENCE.match(line):
            opened = number
            python = inside["language"].lower() in ("python", "python3", "py")
            run += python and not skip
            skipped += python and skip
        elif line.strip():
            skip = _NOT_RUN.match(line) is not None
        lines.append(code)
    if inside is not None:
        raise SystemExit(f"{path}:{opened}: this block is never closed")
    return Program("\n".join(lines), run, skipped)


def run_blocks(path: Path) -> str | None:
    """Run a file's blocks and print how many there are; return the program's output if it failed."""
    program = program_of(path)
    print(f"{path}: {program.run} blocks to run, {program.skipped} skipped", flush=True)
    if not program.run:
        return None
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory(prefix="jaxckpt-docs-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _RUNNER, str(path.resolve())],
                input=program.code,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                timeout=_TIMEOUT_SECONDS,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            printed = late.output.decode(errors="replace") if isinstance(late.output, bytes) else late.output or ""
            return f"{printed}\nnot finished after {_TIMEOUT_SECONDS} s"
    return done.stdout if done.returncode else None


def main(names: list[str]) -> int:
    if not names:
        print("usage: run_blocks.py FILE.md ...", file=sys.stderr)
        return 2
    failed = 0
    for name in names:
        failure = run_blocks(Path(name))
        if failure is not None:
            failed += 1
            print(f"{name}: FAILED\n{failure}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
