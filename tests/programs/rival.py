"""Shared code of the programs of `rivals.Saver`: a loop that saves on request from stdin."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(
    save: Callable[[dict[str, Any], Any], None], prepare: Callable[[dict[str, Any]], Any] = lambda asked: None
) -> None:
    """For each line: prepare, wait for the start time, save, and report the outcome."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        ready = prepare(asked)
        print(json.dumps("prepared"), flush=True)
        while time.time() < asked.get("start", 0):
            pass
        try:
            save(asked, ready)
            said = "saved"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps(said), flush=True)
