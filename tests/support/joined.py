"""Joins the jax.distributed job that `processes.run_processes` started; a program in that job imports it first.

from joined import args, process_id
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import jax

# gloo may print to stdout at any time. Redirect its output to stderr, so that stdout contains only the program's.
sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

process_id = int(sys.argv[1])
"""The number of this process in the job."""

args: Any = json.loads(sys.argv[4])
"""What the test passed to `run_processes`."""

jax.config.update("jax_cpu_collectives_implementation", "gloo")
heartbeat: dict[str, int] = {}
if isinstance(args, dict) and "heartbeat_seconds" in args:  # JAX ends the job if a process is silent for longer
    heartbeat["heartbeat_timeout_seconds"] = args["heartbeat_seconds"]
jax.distributed.initialize(sys.argv[3], int(sys.argv[2]), process_id, initialization_timeout=60, **heartbeat)
