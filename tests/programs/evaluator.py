"""An evaluation that follows a run, reads each step in two passes, and checks every value.

Arguments: the run's directory, the last step of an earlier evaluation, the term of leases, the longest delay between
the passes. Prints a line for each step: its number, and the milliseconds between its publication and its arrival, or
"-" if the evaluation was not waiting for it.
"""

from __future__ import annotations

import os
import random
import sys
import time

import jaxckpt


def main(run: str, after: str, term_seconds: str, longest: str) -> None:
    idle_since = time.time()
    for step in jaxckpt.Run(run).follow(after=int(after), term_seconds=float(term_seconds), poll_seconds=0.02):
        now, published = time.time(), os.stat(f"{step.path}/manifest.json").st_mtime
        delay = f"{1000 * (now - published):.1f}" if published > idle_since else "-"
        assert step.held
        assert (step.open()["first"].value == step.number).all()
        time.sleep(random.uniform(0, float(longest)))
        tree = jaxckpt.load_numpy(step.path)
        assert all((leaf == step.number).all() for leaf in (tree["first"], tree["last"][0]))
        assert tree["last"][1] == step.number
        print(step.number, delay, flush=True)
        idle_since = time.time()
    print("ended", flush=True)


main(*sys.argv[1:])
