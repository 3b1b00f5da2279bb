"""What a program can observe of jaxckpt: log lines, and events of jax.monitoring."""

from __future__ import annotations

import logging

import jax

_log = logging.getLogger("jaxckpt")


def finished(event: str, seconds: float, line: str, *, log: bool, **counts: int) -> None:
    """Record that something is done: the duration event "/jaxckpt/<event>" with its counts, and a log line (INFO).

    Every process records its own events; `log` is for the process that speaks for all.
    """
    jax.monitoring.record_event_duration_secs(f"/jaxckpt/{event}", seconds, **counts)
    if log:
        _log.info("%s", line)
