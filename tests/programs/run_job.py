"""Runs another program in a job, as JSON on stdin specifies; prints how its processes ended."""

from __future__ import annotations

import json
import sys

import processes

name, count, args, timeout = json.load(sys.stdin)
program = processes.PROGRAMS / f"{name}.py"
done = processes.run_processes(program, processes=count, devices_per_process=1, args=args, timeout=timeout)
print(json.dumps([[one.returncode, one.stdout, one.stderr] for one in done]))
