"""The libraries that are measured in turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import orbax.checkpoint as ocp
from lab import Tree
from orbax.checkpoint.experimental import v1

import jaxckpt


class Contender(Protocol):
    """A library that saves and restores trees."""

    def save(self, path: Path, tree: Tree) -> None: ...

    def save_async(self, path: Path, tree: Tree) -> Callable[[], object]:
        """Returns a function that waits for the end of the save."""
        ...

    def restore(self, path: Path, wanted: Any) -> Tree: ...


class OrbaxV0:
    def __init__(self) -> None:
        self.checkpointer: Any = ocp.PyTreeCheckpointer()
        self.background: Any = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def save(self, path: Path, tree: Tree) -> None:
        self.checkpointer.save(path, tree)

    def save_async(self, path: Path, tree: Tree) -> Callable[[], object]:
        self.background.save(path, args=ocp.args.PyTreeSave(tree))
        return self.background.wait_until_finished

    def restore(self, path: Path, wanted: Any) -> Tree:
        arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
        return self.checkpointer.restore(path, item=wanted, restore_args=arguments)


class OrbaxV1:
    def save(self, path: Path, tree: Tree) -> None:
        v1.save(path, tree)

    def save_async(self, path: Path, tree: Tree) -> Callable[[], object]:
        return v1.save_async(path, tree).result

    def restore(self, path: Path, wanted: Any) -> Tree:
        return v1.load(path, wanted)


class Jaxckpt:
    def save(self, path: Path, tree: Tree) -> None:
        jaxckpt.save(path, tree)

    def save_async(self, path: Path, tree: Tree) -> Callable[[], object]:
        return jaxckpt.save_async(path, tree).wait

    def restore(self, path: Path, wanted: Any) -> Tree:
        return jaxckpt.restore(path, wanted)


CONTENDERS: dict[str, Contender] = {"jaxckpt": Jaxckpt(), "orbax v0": OrbaxV0(), "orbax v1": OrbaxV1()}
