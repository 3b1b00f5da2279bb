"""The logger "jaxckpt", for code that may run in the caller's thread.

`logging` takes its locks in Python code. An interrupt of the main thread right after that leaves a lock held, and every
other thread that logs then waits forever. So lines of the main thread are logged in a lane.
"""

from __future__ import annotations

import functools
import logging
import threading
import time

from jaxckpt._pipeline import lanes
from jaxckpt._pipeline.watchdog import Watchdog

_logger = logging.getLogger("jaxckpt")

_SECONDS = 60.0
"""How long a handler may take. The call then continues without it."""


class LaneLog:
    """As `logging.Logger`, without its locks in the main thread."""

    def is_enabled_for(self, level: int) -> bool:
        """Whether lines of this level are logged. `Logger.isEnabledFor` may take a lock."""
        return level >= _logger.getEffectiveLevel() and level > logging.root.manager.disable

    def log(self, level: int, message: str, *arguments: object) -> None:
        if not self.is_enabled_for(level):
            return
        write = functools.partial(_logger.log, level, message, *arguments)
        if lanes.is_in_lane() or threading.current_thread() is not threading.main_thread():
            write()
        else:
            lanes.run(write, Watchdog(_SECONDS), until=time.monotonic() + _SECONDS)

    def info(self, message: str, *arguments: object) -> None:
        self.log(logging.INFO, message, *arguments)

    def warning(self, message: str, *arguments: object) -> None:
        self.log(logging.WARNING, message, *arguments)

    def error(self, message: str, *arguments: object) -> None:
        self.log(logging.ERROR, message, *arguments)


log = LaneLog()
