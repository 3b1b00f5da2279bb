"""Run the Python blocks of Markdown files, so that what the docs show is what happens.

The ```python blocks of one file run in order, in one namespace, in an empty working folder, as if a reader pasted them
into an interpreter: a page that needs 8 simulated devices sets them up itself. A block after `<!-- not run: reason -->`
is skipped, and counted.

    python docs/run_blocks.py README.md docs/*.md

Each file runs in a process of its own. With several files these are forks of one process that has imported JAX, because
an import takes more time than most pages.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"(?P<indent>\s*)(?P<fence>```+|~~~+)\s*(?P<language>\w*)[^`]*$")
_NOT_RUN = re.compile(r"\s*<!-- not run: \S.*-->\s*$")
_TIMEOUT_SECONDS = 300


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
    folder, printed = tempfile.mkdtemp(prefix="jaxckpt-docs-"), tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    child = os.fork()
    if child == 0:  # ends as any Python program does: this function never returns to its caller
        _become(program.code, path.resolve(), folder, printed.fileno())
        sys.exit()
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it left running
    shutil.rmtree(folder)
    with printed:
        printed.seek(0)
        output = printed.read()
    if os.waitstatus_to_exitcode(status) == -signal.SIGALRM:
        output += f"\nnot finished after {_TIMEOUT_SECONDS} s"
    return output if status else None


def _become(code: str, path: Path, folder: str, output: int) -> None:
    """Run a program in this process, which was forked for it."""
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.alarm(_TIMEOUT_SECONDS)
    sys.argv = [str(path)]
    # Compiled under the Markdown file's own name, so a traceback points at its lines.
    exec(compile(code, str(path), "exec", dont_inherit=True), {"__name__": "__main__"})


def main(names: list[str]) -> int:
    if not names:
        print("usage: run_blocks.py FILE.md ...", file=sys.stderr)
        return 2
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("XLA_FLAGS", None)
    if len(names) > 1:
        importlib.import_module("jaxckpt")
    failed = 0
    for name in names:
        failure = run_blocks(Path(name))
        if failure is not None:
            failed += 1
            print(f"{name}: FAILED\n{failure}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
