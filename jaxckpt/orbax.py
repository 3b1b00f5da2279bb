"""Orbax's CheckpointManager with jaxckpt's arrays: the manager keeps its steps, policies, metrics and retention.

    manager = ocp.CheckpointManager(folder, options=…, handler_registry=jaxckpt.orbax.handler_registry())

From there on `ocp.args.StandardSave`, `StandardRestore`, `PyTreeSave` and `PyTreeRestore` of any item go through
`jaxckpt.save_async` and `jaxckpt.restore`. Steps that Orbax itself wrote before are restored as well.

    manager.save ─▶ Orbax makes <step>.orbax-checkpoint-tmp/<item>… ─▶ async_save: jaxckpt copies the arrays, the
    training goes on ─▶ jaxckpt writes the item and publishes it in there ─▶ Orbax waits for all processes, then renames

Importing this module imports Orbax, which takes a second or two.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from jaxckpt._audit import LazyLeaf
from jaxckpt._audit import open as open_checkpoint
from jaxckpt._errors import InputError
from jaxckpt._options import Options
from jaxckpt._restore import restore
from jaxckpt._save import PendingSave, save, save_async
from jaxckpt._tree import Tree

Path = os.PathLike[str]


def handler_registry(options: Options | None = None) -> Any:
    """What to pass as `handler_registry=` of an `ocp.CheckpointManager` to have its pytrees written by jaxckpt.

    Args:
        options: See `jaxckpt.Options`.

    Returns:
        An `ocp.handlers.DefaultCheckpointHandlerRegistry` in which every item that is saved or restored with `Save`,
        `Restore`, `ocp.args.StandardSave`, `StandardRestore`, `PyTreeSave` or `PyTreeRestore` has a `Handler`. Others,
        such as `ocp.args.JsonSave`, have Orbax's own; more can be added.

    Examples:
        >>> import numpy as np, orbax.checkpoint as ocp, jaxckpt.orbax
        >>> ocp.test_utils.erase_and_create_empty("/tmp/jaxckpt-doc/manager").name
        'manager'
        >>> registry = jaxckpt.orbax.handler_registry()
        >>> with ocp.CheckpointManager("/tmp/jaxckpt-doc/manager", handler_registry=registry) as manager:
        ...     saved = manager.save(1, args=ocp.args.StandardSave({"w": np.arange(3.0)}))
        >>> jaxckpt.load_numpy("/tmp/jaxckpt-doc/manager/1/default")
        {'w': array([0., 1., 2.])}
    """
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handler = Handler(options)
    for kind in (Save, Restore, _args.StandardSave, _args.StandardRestore, _args.PyTreeSave, _args.PyTreeRestore):
        registry.add(None, kind, handler)
    return registry


_args: Any = ocp.args


class Handler(ocp.AsyncCheckpointHandler):
    """Saves and restores an item of an Orbax checkpoint; every process calls it.

    For an `ocp.CheckpointManager`, or a checkpointer with an `ocp.CompositeCheckpointHandler`: by `handler_registry`,
    or as `item_handlers={"state": Handler()}`, where items are saved with `Save` and restored with `Restore`. It has no
    state: one serves several items. Those of one step are written one after the other, and all but the last of them
    before `CheckpointManager.save` returns.

    Args:
        options: See `jaxckpt.Options`; `when_busy` is always "wait".
    """

    def __init__(self, options: Options | None = None) -> None:
        self._options = dataclasses.replace(options or Options(), when_busy="wait")

    async def async_save(self, directory: Path, args: Any) -> list[Any]:
        """Begin to save `args.item`; returns once the caller may donate, delete or overwrite its arrays."""
        # Orbax creates the folder in a thread. Wait for it without an await: Orbax starts the items of a step in the order
        # of their names, and every process must make its collective calls in that order.
        CommitFutureAwaitingContractedSignals(_nothing()).result()
        metadata = getattr(args, "custom_metadata", None)
        return [_Commit(save_async(directory, args.item, metadata=metadata, options=self._options))]

    def save(self, directory: Path, args: Any) -> None:
        """Save `args.item`."""
        save(directory, args.item, metadata=getattr(args, "custom_metadata", None), options=self._options)

    def restore(self, directory: Path, args: Any = None) -> Tree:
        """The item, onto the devices that `args` tells; see `jaxckpt.restore`. Orbax's own are taken too."""
        args = args or Restore()
        if isinstance(args, Restore):
            return restore(
                directory, args.item, mesh=args.mesh, specs=args.specs, strict=args.strict, options=self._options
            )
        if getattr(args, "transforms", None) is not None or getattr(args, "legacy_transform_fn", None) is not None:
            raise InputError("PyTreeRestore(transforms=…) is Orbax's own; see rename= and select= of jaxckpt.restore")
        item, restore_args = args.item, getattr(args, "restore_args", None)
        if restore_args is not None:
            item = open_checkpoint(directory).tree() if item is None else item
            item = jax.tree.map(lambda leaf, one: _wanted(one, _plain(leaf)), item, restore_args)
        target = jax.tree.map(_plain, item)
        partial = getattr(args, "partial_restore", False)
        return restore(directory, target, strict=not partial, options=self._options)

    def metadata(self, directory: Path) -> Tree:
        """The item's tree: a jax.ShapeDtypeStruct for each array, and the small values themselves."""
        return jax.tree.map(_plain, open_checkpoint(directory).tree())


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclass
class Save(ocp.args.CheckpointArgs):
    """What to save as an item of an Orbax checkpoint."""

    item: Tree
    """A pytree, as for `jaxckpt.save`."""

    custom_metadata: Any = None
    """Any JSON value; it comes back as `jaxckpt.open(path).metadata`."""


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclass
class Restore(ocp.args.CheckpointArgs):
    """How to restore an item of an Orbax checkpoint; the arguments of `jaxckpt.restore`."""

    item: Tree = None
    """What is wanted, as `jaxckpt.restore` takes it for `target`."""

    mesh: Any = None
    specs: Any = None
    strict: bool = True


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Commit:
    """A save under way, as Orbax waits for it."""

    pending: PendingSave

    def result(self, timeout: float | None = None) -> None:
        self.pending.wait(timeout)

    def cancel(self) -> bool:
        return False


# Orbax's targets ------------------------------------------------------------------------------------------


def _plain(leaf: Any) -> Any:
    """A leaf of a target as jaxckpt takes it."""
    if isinstance(leaf, ocp.metadata.ArrayMetadata):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf.sharding))
    if isinstance(leaf, LazyLeaf):
        return leaf.value if leaf.nbytes == 0 else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _wanted(asked: Any, leaf: Any) -> Any:
    """A leaf of a target as its RestoreArgs ask for it."""
    if not isinstance(asked, ocp.RestoreArgs) or not hasattr(leaf, "shape"):
        return leaf
    shape, sharding = leaf.shape, getattr(leaf, "sharding", None)
    dtype = leaf.dtype if asked.dtype is None else asked.dtype
    if asked.restore_type is np.ndarray:
        return np.broadcast_to(np.empty((), dtype), shape)
    if isinstance(asked, ocp.ArrayRestoreArgs):
        shape = shape if asked.global_shape is None else asked.global_shape
        if asked.sharding is not None:
            sharding = _sharding(asked.sharding)
        elif asked.mesh is not None:
            sharding = NamedSharding(asked.mesh, asked.mesh_axes or PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _sharding(found: Any) -> Sharding | None:
    return found.to_jax_sharding() if hasattr(found, "to_jax_sharding") else found
