"""A rival that saves with Orbax's StandardCheckpointer."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp
from rival import serve
from rivals import version


def save(asked: dict[str, Any], checkpointer: ocp.StandardCheckpointer) -> None:
    checkpointer.save(asked["path"], version(asked["version"]), force=asked["overwrite"])
    checkpointer.wait_until_finished()


serve(save, lambda asked: ocp.StandardCheckpointer())
