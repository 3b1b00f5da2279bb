"""The failure of a process as a message to the others, and the error that they raise."""

from __future__ import annotations

from typing import Any

from jaxckpt.errors import (
    PathNotSharedError,
    PeerError,
    PeerFailedError,
    PeersDisagreeError,
    PeerTimeoutError,
    show_lines,
)

# Errors about peers, and errors that are equal in all processes, keep their type. Others become PeerFailedError.
_KINDS: dict[str, type[PeerError]] = {
    kind.__name__: kind for kind in (PeerFailedError, PeerTimeoutError, PeersDisagreeError, PathNotSharedError)
}


def failure_message(process: int, error: BaseException, *, repeats_earlier: bool) -> dict[str, Any]:
    """The message of a process that raises an error."""
    message = {"error": str(error), "kind": type(error).__name__, "repeats_earlier": repeats_earlier}
    if type(error).__name__ in _KINDS:
        return message
    text = f"process {process} failed with {type(error).__name__}: {error}"
    return {**message, "error": text, "kind": PeerFailedError.__name__}


def combined_error(failures: list[dict[str, Any]], what: str) -> PeerError:
    """One error for all failures, of the type of the first."""
    errors = list(dict.fromkeys(failure["error"] for failure in failures))
    several = f"{len(errors)} failures while {what}:\n{show_lines(errors)}"
    combined = _KINDS[failures[0]["kind"]](errors[0] if len(errors) == 1 else several)
    combined.repeats_earlier = all(failure.get("repeats_earlier", False) for failure in failures)
    return combined
