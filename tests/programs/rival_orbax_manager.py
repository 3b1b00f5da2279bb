"""A rival that saves step 1 with Orbax's CheckpointManager."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp
from rival import serve
from rivals import version


def save(asked: dict[str, Any], manager: ocp.CheckpointManager) -> None:
    manager.save(1, args=ocp.args.StandardSave(version(asked["version"])))
    manager.wait_until_finished()


serve(save, lambda asked: ocp.CheckpointManager(asked["path"]))
