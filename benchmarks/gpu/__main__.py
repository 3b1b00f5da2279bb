"""Correctness checks and speed measurements on a GPU, run by `make gpu`.

    python benchmarks/gpu [--dry] [--only NAMES] [--seconds 600] [--out FOLDER]

The sections run in the order of their value, in a worker process that is replaced if it aborts, hangs or is out of
time. Each figure is printed at once and written to figures.json; the lines to read first are printed at the end. The
exit status is 1 if a check failed or did not run, and 2 without an accelerator.

`--dry` runs the same code with small arrays on any device, such as JAX's CPU devices. It shows only that the code
works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import environment
from sections import Section
from summary import problems, summary
from supervisor import NoAcceleratorError, Supervisor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="small arrays, on any device")
    parser.add_argument("--only", type=lambda text: text.split(","), help="sections, or the first words of their names")
    parser.add_argument("--list", action="store_true", help="print the names of the sections")
    parser.add_argument("--seconds", type=float, default=600, help="sections that do not fit are left out")
    parser.add_argument("--out", type=Path, default=os.environ.get("GPU_OUT") or ".gpu")
    parser.add_argument("--wheels", default=os.environ.get("GPU_WHEELS"), help="a folder with missing packages")
    parser.add_argument("--sections", default="sections:SECTIONS", help="module:name of a list of sections")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        from worker import serve  # imports JAX

        serve(given.worker, given.out, given.dry)
        return 0
    module, _, name = given.sections.partition(":")
    sections = chosen(getattr(importlib.import_module(module), name), given.only)
    if given.dry:  # on a machine that runs other tests at the same time
        sections = [replace(section, limit_seconds=4 * section.limit_seconds) for section in sections]
    if given.list:
        print("\n".join(section.name for section in sections))
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="jaxckpt-gpu-site-") as site:
        try:
            variables = environment.prepare(Path(site), given.wheels)
        except FileNotFoundError as error:
            sys.exit(str(error))
        return run(sections, given, variables)


def chosen(sections: Sequence[Section], only: list[str] | None) -> list[Section]:
    for name in only or []:
        if not any(name in (section.name, section.name.split()[0]) for section in sections):
            sys.exit(f"--only: no section {name!r}; --list lists them")
    return [section for section in sections if not only or {section.name, section.name.split()[0]} & {*only}]


def run(sections: list[Section], given: argparse.Namespace, variables: dict[str, str]) -> int:
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("log.txt", "worker.txt"):
        (out / name).unlink(missing_ok=True)
    arguments = ["--out", str(out), *(["--dry"] if given.dry else [])]
    supervisor = Supervisor(out, given.seconds, arguments, variables)
    supervisor.note("run", environment.facts(given.wheels, given.dry))
    try:
        supervisor.run(sections)
    except NoAcceleratorError:
        print("JAX found no accelerator; --dry runs the same code on CPU devices", file=sys.stderr)
        return 2
    failed = [one.name for one in sections if one.is_check and problems(supervisor.figures, one.name)]
    for line in summary(supervisor.figures, failed):
        supervisor.say(line)
    supervisor.say(f"{supervisor.seconds():.0f} s of {given.seconds:.0f} s; results in {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
