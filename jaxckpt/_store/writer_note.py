"""The note of a writer in its data folder: who writes there, and which manifest the save will replace."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from jaxckpt.errors import CheckpointExistsError


def parse_note(content: bytes | None) -> dict[str, Any]:
    """A note, such as a writer's, as a dict; empty if it is missing or malformed."""
    try:
        note = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def manifest_identity(manifest: bytes | None) -> str | None:
    """What a writer's note says about the manifest that its save will replace. None: there is none."""
    return None if manifest is None else hashlib.sha256(manifest).hexdigest()


def overtaken_error(url: str, *, was_deleted: bool = False) -> CheckpointExistsError:
    """The error of a save that may no longer publish."""
    if was_deleted:
        return CheckpointExistsError(
            f"the checkpoint at {url} was deleted while this save was replacing it; this save was abandoned, save again"
        )
    return CheckpointExistsError(
        f"another save published a checkpoint at {url} while this one was writing; this save was abandoned"
    )
