"""The exit status of a program of which a background save failed.

Python prints errors in functions that are registered with atexit, but then exits with status 0.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

_status = 0


def set_exit_status(status: int) -> None:
    """Make the program exit with this status, whatever it passes to sys.exit. Only the first call has an effect."""
    global _status
    _status = _status or status


def exit_with_status_at_exit() -> None:
    """Register this with atexit. Functions that are registered later run before it. If there is a status, functions
    that were registered earlier do not run."""
    atexit.register(_exit_with_status)


def _exit_with_status() -> None:
    if _status:  # Python cannot exit cleanly while a thread is writing
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)
