"""What a program can observe of jaxckpt: log lines, and events of jax.monitoring."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from jaxckpt._pipeline.units import show_bytes
from jaxckpt.errors import show_count

_log = logging.getLogger("jaxckpt")


def record_event(event: str, seconds: float, line: Callable[[], str], *, log: bool, **counts: int) -> None:
    """Record that something is done: the duration event "/jaxckpt/<event>" with its counts, and a log line (INFO).

    Every process records its own events. `log` is set only in the process that logs for all.
    """
    jax = sys.modules.get("jax")  # in a program that has not imported JAX, nothing listens
    try:
        if jax is not None:
            jax.monitoring.record_event_duration_secs(f"/jaxckpt/{event}", seconds, **counts)
    except Exception as error:
        _log.warning("a jax.monitoring listener failed after %s: %r", event, error)
    if log and _log.isEnabledFor(logging.INFO):
        _log.info("%s", line())


def log_unlinked(url: str, n_bytes: int, reason: str) -> None:
    """Log that a save wrote data again that it could have linked otherwise."""
    _log.info("%s: wrote %s again that seem unchanged since the last save: %s", url, show_bytes(n_bytes), reason)


def log_kept(url: str, name: str) -> None:
    """Log that data whose manifest was lost is not deleted."""
    _log.warning(
        "%s has lost its manifest.json; %s in it was published, and is kept until a checkpoint replaces it", url, name
    )


def log_swept(url: str, name: str) -> None:
    """Log that the remains of a save or of a deletion were deleted."""
    _log.info("deleted %s/%s, left by a save that failed or was replaced, or by a deletion", url, name)


def warn_replicated(url: str, n_arrays: int, n_bytes: int, n_devices: int) -> None:
    """Log arrays that a restore onto a mesh replicates without being asked to."""
    _log.warning(
        "%s: neither specs= nor the checkpoint says how to split %s, %s as stored: each of the %d devices gets a whole"
        " copy. Pass specs=, or specs=PartitionSpec() to replicate without this warning",
        url,
        show_count(n_arrays, "array"),
        show_bytes(n_bytes),
        n_devices,
    )
