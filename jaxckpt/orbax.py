"""Orbax's CheckpointManager with jaxckpt's arrays: the manager keeps its steps, policies, metrics and retention.

    manager = ocp.CheckpointManager(folder, options=…, handler_registry=jaxckpt.orbax.handler_registry())

This manager saves and restores every item of `ocp.args.StandardSave`, `StandardRestore`, `PyTreeSave` and
`PyTreeRestore` with `jaxckpt.save_async` and `jaxckpt.restore`. It also restores steps that Orbax itself wrote before.

A restore translates Orbax's arguments, leaf by leaf, into the target of `jaxckpt.restore`.

    manager.save ─▶ Orbax creates <step>.orbax-checkpoint-tmp/<item>… ─▶ async_save: jaxckpt copies the arrays, and
    training resumes ─▶ jaxckpt writes and publishes the item there ─▶ Orbax waits for all processes, then renames

Importing this module imports Orbax, which takes a second or two.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import importlib
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint._src.metadata.tree import build_default_tree_metadata
from orbax.checkpoint._src.metadata.value import StorageMetadata
from orbax.checkpoint.checkpoint_args import get_registered_args_cls, has_registered_args
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from jaxckpt._arguments.pytree import Leaf, flatten
from jaxckpt._devices.shardings import TypedLeaf, partition_spec, saved_sharding
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.grid import spec_of
from jaxckpt._model.paths import closest_hint, path_prefixes
from jaxckpt._model.records import Manifest
from jaxckpt._model.tree import Tree, unflatten
from jaxckpt._model.values import KINDS, NUMBER_KINDS, PYTHON_KINDS
from jaxckpt._options import Options, options_or_default
from jaxckpt._restore.match import is_array_like
from jaxckpt._restore.restore import restore
from jaxckpt._save.running_saves import PendingSave
from jaxckpt._save.save import save, save_async
from jaxckpt._sources.open_source import source_at
from jaxckpt._sources.source import NativeCheckpoint
from jaxckpt.errors import InputError, LayoutError, MismatchError, Problem, show_count

Path = os.PathLike[str]
T = TypeVar("T")

_args: Any = ocp.args
_metadata: Any = ocp.metadata

_PYTREE_ARGS = (_args.StandardSave, _args.StandardRestore, _args.PyTreeSave, _args.PyTreeRestore)
_PYTREE_HANDLERS = (ocp.StandardCheckpointHandler, ocp.PyTreeCheckpointHandler)


@explain_keywords
def handler_registry(
    options: Options | None = None, *, item_handlers: Mapping[str, Any] | ocp.CheckpointHandler | None = None
) -> Any:
    """The argument `handler_registry=` for an `ocp.CheckpointManager` whose pytrees jaxckpt should write.

    Args:
        options: See `jaxckpt.Options`.
        item_handlers: The handler of each item, or of the only item, in the form that `ocp.CheckpointManager` accepts.
            A `Handler` replaces Orbax's pytree handlers; other handlers, also subclasses of these, are kept.

    Returns:
        An `ocp.handlers.DefaultCheckpointHandlerRegistry` in which every item saved or restored with `Save`, `Restore`,
        `ocp.args.StandardSave`, `StandardRestore`, `PyTreeSave` or `PyTreeRestore` has a `Handler`. Other items, such
        as those of `ocp.args.JsonSave`, have Orbax's handlers. You can add more handlers.

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
    ours = Handler(options)
    if isinstance(item_handlers, ocp.CheckpointHandler):
        item_handlers = {"default": item_handlers}
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for name, own in {None: ours, **(item_handlers or {})}.items():
        if isinstance(own, Handler) or type(own) in _PYTREE_HANDLERS:
            for kind in (Save, Restore, *_PYTREE_ARGS):
                registry.add(name, kind, own if isinstance(own, Handler) else ours)
        elif has_registered_args(own):
            for kind in dict.fromkeys(get_registered_args_cls(own)):
                registry.add(name, kind, own)
        else:
            raise InputError(
                f"item_handlers: {type(own).__name__} has no arguments of its own: register them with"
                " ocp.args.register_with_handler, or pass a jaxckpt.orbax.Handler"
            )
    return registry


class Handler(ocp.AsyncCheckpointHandler):
    """Saves and restores an item of an Orbax checkpoint. Every process calls it.

    Use it in an `ocp.CheckpointManager` or an `ocp.CompositeCheckpointHandler`: through `handler_registry`, or as
    `item_handlers={"state": Handler()}`, with the arguments `Save` and `Restore`. It also works in an
    `ocp.Checkpointer` or `ocp.AsyncCheckpointer`. A Handler has no state, so it can serve several items. A step's items
    are written one after the other, and all except the last before `CheckpointManager.save` returns.

    Args:
        options: See `jaxckpt.Options`; `when_busy` is always "wait".
    """

    def __init__(self, options: Options | None = None) -> None:
        self._options = dataclasses.replace(options_or_default(options), when_busy="wait")

    async def async_save(self, directory: Path, args: Any) -> list[Any]:
        """Start to save `args.item`. Returns as soon as it is safe to donate, delete or overwrite its arrays."""
        # Orbax creates the folder in a thread. Wait for it without an await: Orbax starts the items of a step in the
        # order of their names, and every process must make its collective calls in that order.
        CommitFutureAwaitingContractedSignals(_nothing()).result()
        return [_Commit(save_async(directory, _cast(args), **self._save_arguments(args)))]

    def save(self, directory: Path, args: Any) -> None:
        """Save `args.item`."""
        save(directory, _cast(args), **self._save_arguments(args))

    def _save_arguments(self, args: Any) -> dict[str, Any]:
        return {"metadata": args.custom_metadata, "options": self._options}

    def restore(self, directory: Path, args: Any = None) -> Tree:
        """Restore the item onto the devices given by `args`; see `jaxckpt.restore`. Also accepts Orbax's arguments."""
        args = Restore() if args is None else args
        if isinstance(args, Restore) and not args.is_orbax:
            return restore(
                directory, args.item, mesh=args.mesh, specs=args.specs, strict=args.strict, options=self._options
            )
        if isinstance(args, Restore) and (args.mesh is not None or args.specs is not None or args.strict is not True):
            raise InputError("Restore takes mesh=, specs= and strict=, or Orbax's own arguments, not both")
        source = source_at(directory, self._options)
        target, kept_paths = _translated(args, source.manifest)
        return _restore_leaves(directory, source.manifest, target, kept_paths, self._options)

    def metadata(self, directory: Path) -> Any:
        """What `CheckpointManager.item_metadata` returns: Orbax's own description of the item's leaves."""
        source = source_at(directory, self._options)
        manifest = source.manifest
        leaves = [_described(TypedLeaf(manifest, record), directory) for record in manifest.leaves]
        tree = jax.tree.map(_describe_empty, unflatten(manifest.tree, leaves), is_leaf=ocp.utils.is_empty_or_leaf)
        tree = ocp.tree.serialize_tree(tree, keep_empty_nodes=True)
        return build_default_tree_metadata(tree, custom_metadata=manifest.metadata)


@explain_keywords
def register_v1(options: Options | None = None) -> None:
    """Make jaxckpt save and load the pytrees that the program passes to Orbax v1 after this call.

    `ocp.training.Checkpointer`, `ocp.save` and `ocp.load` of `orbax.checkpoint.experimental.v1`, and libraries that use
    them, work as before. They also load checkpoints that Orbax itself wrote. Call it before the program creates a
    `Context` or a `Checkpointer` of v1. The pytrees of a step are written one after the other, in the order of their
    names, and all except the last before `save_checkpointables_async` returns.

    Args:
        options: See `jaxckpt.Options`; `when_busy` is always "wait".
    """
    importlib.import_module("orbax.checkpoint.experimental.v1")  # registers Orbax's own handlers first
    from orbax.checkpoint.experimental.v1._src.handlers.registration import global_registry

    chosen = dataclasses.replace(options_or_default(options), when_busy="wait")
    handler = type("V1Handler", (V1Handler,), {"options": chosen, "__module__": __name__})
    entries: Any = global_registry().get_all_entries()  # Orbax uses the last entry that can handle a pytree
    other_entries = [entry for entry in entries if entry[1] != "state" and not issubclass(entry[0], V1Handler)]
    entries[:] = [*other_entries, (handler, None), (handler, "state")]
    logging.getLogger("absl").addFilter(_is_not_a_false_alarm)


class V1Handler:
    """Saves and loads a pytree of an Orbax v1 checkpoint; `register_v1` registers it."""

    options = Options()

    async def save(self, directory: Any, checkpointable: Tree) -> Awaitable[None]:
        """Start to save. Returns as soon as it is safe to donate, delete or overwrite the arrays."""
        path: Path = directory.path
        turn = _call_in_name_order(
            path, directory.await_creation(), lambda: save_async(path, _v1_cast(checkpointable), options=self.options)
        )
        return _wait_and_mark(await (await turn), path)

    async def load(self, directory: Path, abstract_checkpointable: Tree = None) -> Awaitable[Tree]:
        """Load the pytree in the form that an abstract pytree requests."""
        return await _call_in_name_order(
            directory, _nothing(), lambda: self._restore(directory, abstract_checkpointable)
        )

    def _restore(self, directory: Path, abstract: Tree) -> Tree:
        from orbax.checkpoint.experimental.v1._src.context.context import get_context

        if abstract is None:
            return restore(directory, options=self.options)
        manifest = source_at(directory, self.options).manifest
        leaves = [_v1_leaf(leaf, manifest) for leaf in _flatten(abstract, manifest)]
        target = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        strict = not get_context().pytree_options.loading.partial_load
        kept_paths = _placeholder_paths(abstract, manifest)
        return _restore_leaves(directory, manifest, target, kept_paths, self.options, strict=strict)

    async def metadata(self, directory: Path) -> Tree:
        """Orbax's own description of the saved tree: an ArrayMetadata for each jax.Array, a NumpyMetadata for each
        NumPy array, and types. The files of a checkpoint that Orbax wrote are described by Orbax."""
        from orbax.checkpoint.experimental.v1._src.handlers.pytree_handler import PyTreeHandler

        source = source_at(directory, self.options)
        if not isinstance(source, NativeCheckpoint):
            return await PyTreeHandler().metadata(epath.Path(directory))
        leaves = [_v1_described(TypedLeaf(source.manifest, record)) for record in source.manifest.leaves]
        return unflatten(source.manifest.tree, leaves)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether jaxckpt can save this pytree. Orbax calls this before it saves."""
        leaves = jax.tree.leaves(checkpointable)
        return bool(leaves) and all(is_array_like(type(leaf)) or type(leaf) in PYTHON_KINDS for leaf in leaves)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Whether this is a pytree of arrays, shapes, types, None and `...` that describes what to load."""
        leaves = jax.tree.leaves(abstract_checkpointable, is_leaf=_is_none)
        return abstract_checkpointable is not None and bool(leaves) and all(map(_is_v1_abstract, leaves))


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Turn:
    """A collective call for a pytree of a step that Orbax saves or loads."""

    path: str
    call: Callable[[], Any]
    outcome: asyncio.Future[Any]
    is_ready: bool = False


class _Turns(threading.local):
    """The calls that have not been made, in any event loop of this thread."""

    def __init__(self) -> None:
        # Each is held by its task, and disappears with it if the event loop ends before the call.
        self.waiting: weakref.WeakSet[_Turn] = weakref.WeakSet()


_turns = _Turns()


async def _call_in_name_order(path: Path, ready: Awaitable[Any], call: Callable[[], T]) -> asyncio.Future[T]:
    """Make a collective call for a pytree when `ready` ends, in the order of the names of the step's pytrees. Returns
    its outcome.

    Orbax starts the tasks of all pytrees of a step together, and then resumes them in an order that differs between
    the processes. The last that is ready makes the calls of all. It makes each of them even if an earlier one raises,
    so that the processes make the same calls.
    """
    loop = asyncio.get_running_loop()
    own = _Turn(os.fspath(path), call, loop.create_future())
    _turns.waiting.add(own)
    await asyncio.sleep(0)  # until the tasks of the other pytrees have started, even if the folder exists
    await ready
    own.is_ready = True
    turns = [turn for turn in _turns.waiting if turn.outcome.get_loop() is loop]
    if all(turn.is_ready for turn in turns):
        _turns.waiting.difference_update(turns)
        for turn in sorted(turns, key=lambda turn: turn.path):
            try:
                turn.outcome.set_result(turn.call())
            except Exception as error:
                turn.outcome.set_exception(error)
                turn.outcome.exception()  # Orbax may drop it after another error; then asyncio need not log it
    await asyncio.wait([own.outcome])
    return own.outcome


def _is_not_a_false_alarm(record: logging.LogRecord) -> bool:
    """Drop Orbax's warning that a step lacks tensorstore's files if jaxckpt wrote a pytree of it."""
    if not str(record.msg).startswith("TensorStore data files not found") or not isinstance(record.args, tuple):
        return True
    return not any(True for path in record.args for _ in epath.Path(str(path)).glob("*/manifest.json"))


def _v1_cast(tree: Tree) -> Tree:
    """The tree to save, with the dtypes that the storage options of Orbax's context request."""
    from orbax.checkpoint.experimental.v1._src.context.context import get_context
    from orbax.checkpoint.experimental.v1._src.serialization.options_resolution import resolve_storage_options

    saving = get_context().array_options.saving
    if saving.storage_options.dtype is None and saving.scoped_storage_options_creator is None:
        return tree
    return jax.tree.map_with_path(
        lambda keys, leaf: _cast_leaf(leaf, resolve_storage_options(keys, leaf, saving)), tree
    )


async def _wait_and_mark(pending: PendingSave, path: Path) -> None:
    try:
        await asyncio.to_thread(pending.wait)
    finally:
        pending.wait()  # even if Orbax cancels this task: the next save of the step would raise the error of this one
    if jax.process_index() == 0:  # Orbax loads an item as a pytree only if it has this file
        await asyncio.to_thread(epath.Path(path, "_METADATA").write_text, "{}")


def _is_v1_abstract(leaf: Any) -> bool:
    kind = leaf if isinstance(leaf, type) else type(leaf)
    return leaf is None or leaf is ... or kind in PYTHON_KINDS or is_array_like(kind) or _v1_array(kind) is not None


def _v1_array(kind: type) -> type | None:
    """The type of array that Orbax v1 restores for abstract leaves of this type; None if they describe no arrays."""
    from orbax.checkpoint.experimental.v1._src.serialization.protocol_utils import is_subclass_protocol
    from orbax.checkpoint.experimental.v1._src.serialization.types import AbstractArray, AbstractShardedArray

    if is_subclass_protocol(kind, AbstractShardedArray):
        return jax.Array
    return np.ndarray if is_subclass_protocol(kind, AbstractArray) else None


def _v1_leaf(leaf: Leaf, manifest: Manifest) -> Any:
    """Translate a leaf of an abstract pytree of Orbax v1 into a leaf of a target."""
    abstract, number = leaf.value, manifest.numbers.get(leaf.path)
    if isinstance(abstract, type):
        if abstract in PYTHON_KINDS or number is None:
            return abstract() if abstract in PYTHON_KINDS else abstract
        saved = TypedLeaf(manifest, manifest.leaves[number])
        kind = None if issubclass(abstract, np.generic) else _v1_array(abstract)
        return _translate_restore_args(ocp.RestoreArgs(restore_type=kind), saved)
    kind = None if is_array_like(type(abstract)) else _v1_array(type(abstract))
    if kind is None:
        return abstract
    if kind is jax.Array:
        return jax.ShapeDtypeStruct(abstract.shape, abstract.dtype, sharding=abstract.sharding)
    return np.broadcast_to(np.empty((), abstract.dtype), abstract.shape)


def _v1_described(saved: TypedLeaf) -> Any:
    """Orbax v1's description of a leaf."""
    from orbax.checkpoint.experimental.v1._src.serialization.array_leaf_handler import ArrayMetadata
    from orbax.checkpoint.experimental.v1._src.serialization.numpy_leaf_handler import NumpyMetadata

    if saved.on_devices:
        return ArrayMetadata(saved.shape, saved.dtype, _describe_sharding(saved), _describe_storage(saved))
    if saved.kind == "numpy":
        return NumpyMetadata(saved.shape, saved.dtype, _describe_storage(saved))
    return saved.dtype.type if saved.kind == "numpy_scalar" else KINDS[saved.kind].type


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclass
class Save(_args.PyTreeSave):
    """The arguments for saving an item of an Orbax checkpoint: `item`, a pytree as for `jaxckpt.save`; `save_args`, a
    tree of ocp.SaveArgs, of which only `dtype` is used; and `custom_metadata`, any JSON value, available later as
    `jaxckpt.open(path).metadata`."""


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclass
class Restore(_args.PyTreeRestore):
    """The arguments for restoring an item of an Orbax checkpoint: those of `jaxckpt.restore`, with `item` as the
    target; or those of `ocp.args.PyTreeRestore`, if any of them except `item` is given."""

    mesh: Any = None
    specs: Any = None
    strict: Any = True

    @property
    def is_orbax(self) -> bool:
        """Whether this has arguments of `ocp.args.PyTreeRestore`."""
        return self.restore_args is not None or self.transforms is not None or self.partial_restore


async def _nothing() -> None:
    pass


@dataclass(eq=False, slots=True)
class _Commit:
    """A running save, in the form that Orbax waits for. A cancelled save still ends, but Orbax does not publish it."""

    pending: PendingSave
    is_cancelled: bool = False

    def result(self, timeout: float | None = None) -> None:
        self.pending.wait(timeout)
        if self.is_cancelled:
            raise concurrent.futures.CancelledError

    def cancel(self) -> None:
        self.is_cancelled |= not self.pending.done


def _restore_leaves(
    directory: Path, manifest: Manifest, target: Tree, kept_paths: set[str], options: Options, *, strict: bool = True
) -> Tree:
    """Restore the leaves of a target that do not keep their values."""
    if kept_paths >= manifest.numbers.keys() | {leaf.path for leaf in _flatten(target, manifest)}:
        return target  # there is nothing to read
    return restore(directory, target, select=lambda path: path not in kept_paths, strict=strict, options=options)


# Orbax's arguments ------------------------------------------------------------------------------------------


def _cast(args: Any) -> Tree:
    """The item to save, with the dtypes of its SaveArgs."""
    if args.save_args is None:
        return args.item
    # An empty node may have SaveArgs of its own.
    return jax.tree.map(_cast_leaf, args.item, args.save_args, is_leaf=ocp.utils.is_empty_or_leaf)


def _cast_leaf(leaf: Any, save_args: Any) -> Any:
    dtype = getattr(save_args, "dtype", None)
    if dtype is None or isinstance(leaf, (str, bytes)) or _is_key(leaf):
        return leaf
    if isinstance(leaf, (bool, int, float)):
        return np.asarray(leaf).astype(dtype).item()
    return leaf.astype(dtype) if hasattr(leaf, "astype") else leaf


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _translated(args: Any, manifest: Manifest) -> tuple[Tree, set[str]]:
    """Orbax's arguments as a target of `jaxckpt.restore`, and the paths that keep the item's values."""
    transforms = getattr(args, "transforms", None)
    if transforms or getattr(args, "legacy_transform_fn", None) is not None:
        raise InputError("PyTreeRestore(transforms=…) is Orbax's own; see rename= and select= of jaxckpt.restore")
    # transforms={} is the older form of partial_restore=True. It ignores the item's shapes and dtypes.
    partial = transforms is not None or getattr(args, "partial_restore", False)
    saved_tree = unflatten(manifest.tree, range(len(manifest.leaves)))
    item = saved_tree if args.item is None else args.item
    leaves = _flatten(item, manifest)
    kept_paths = _placeholder_paths(item, manifest)
    requested_paths = {leaf.path for leaf in leaves} - kept_paths
    is_standard = isinstance(args, _args.StandardRestore) and args.item is not None
    empty_nodes = {} if is_standard else _empty_nodes(saved_tree, manifest)
    restore_args = _restore_args(args, requested_paths, manifest.numbers.keys() | empty_nodes.keys(), manifest)
    if partial:
        _require_leaves(requested_paths, manifest)
        kept_paths |= requested_paths ^ manifest.numbers.keys()
    kept_paths |= requested_paths & empty_nodes.keys()

    def target(leaf: Leaf) -> Any:
        if leaf.path in requested_paths and leaf.path in empty_nodes:
            return empty_nodes[leaf.path]
        number = manifest.numbers.get(leaf.path)
        if number is None or leaf.path in kept_paths:
            return leaf.value
        saved = TypedLeaf(manifest, manifest.leaves[number])
        if is_standard:
            return _standard(leaf.value, saved, support_layout=args.support_layout)
        described = leaf.value if transforms is None else None
        return _translate_restore_args(restore_args.get(leaf.path, ocp.RestoreArgs()), saved, described)

    return jax.tree.unflatten(jax.tree.structure(item), [target(leaf) for leaf in leaves]), kept_paths


def _flatten(tree: Tree, manifest: Manifest) -> list[Leaf]:
    """The leaves of a tree, each with its path in the checkpoint."""
    return [msgspec.structs.replace(leaf, path=leaf.path_in(manifest.numbers)) for leaf in flatten(tree)[0]]


def _placeholder_paths(item: Tree, manifest: Manifest) -> set[str]:
    """The paths at which an item has a placeholder or None, and nothing is read."""
    everywhere = _flatten(jax.tree.map(_or_placeholder, item, is_leaf=_is_none), manifest)
    return {leaf.path for leaf in everywhere if leaf.value is ocp.PLACEHOLDER}


def _empty_nodes(saved_tree: Tree, manifest: Manifest) -> dict[str, Any]:
    """What Orbax restores for a leaf of the item at each path where an empty container or None was saved."""
    types = jax.tree.map(
        lambda node: node if isinstance(node, int) else type(node), saved_tree, is_leaf=ocp.utils.is_empty_or_leaf
    )
    return {
        leaf.path: leaf.value() if leaf.value in (dict, list, tuple) else None
        for leaf in _flatten(types, manifest)
        if not isinstance(leaf.value, int)
    }


def _is_none(node: Any) -> bool:
    return node is None


def _or_placeholder(node: Any) -> Any:
    return ocp.PLACEHOLDER if node is None else node


def _restore_args(args: Any, requested_paths: set[str], saved_paths: set[str], manifest: Manifest) -> dict[str, Any]:
    """The RestoreArgs of each leaf. Raises InputError if a leaf has none, or if some belong to no leaf."""
    tree = getattr(args, "restore_args", None)
    if tree is None:
        return {}
    leaves = _flatten(jax.tree.map(lambda leaf_args: leaf_args or ocp.RestoreArgs(), tree, is_leaf=_is_none), manifest)
    by_path = {leaf.path: leaf.value for leaf in leaves}
    lacking = [path for path in requested_paths if path not in by_path and path in manifest.numbers]
    unknown = by_path.keys() - requested_paths - saved_paths
    surplus = [path for path, leaf_args in by_path.items() if path in unknown and leaf_args != ocp.RestoreArgs()]
    problems = [Problem(path, "is a leaf without RestoreArgs") for path in sorted(lacking)]
    problems += [
        Problem(path, f"has RestoreArgs, but is not a leaf{closest_hint(path, requested_paths)}") for path in surplus
    ]
    if problems:
        raise InputError.of(f"restore_args= does not fit the item in {show_count(len(problems), 'place')}", problems)
    return by_path


def _require_leaves(requested_paths: set[str], manifest: Manifest) -> None:
    """Raise MismatchError if a leaf of a partial item is a container in the checkpoint, or the other way round."""
    containers = {head for path in manifest.numbers for head in path_prefixes(path) if head != path}
    problems = [
        Problem(path, "is a container in the checkpoint, a leaf in the item") for path in requested_paths & containers
    ]
    for path in requested_paths - manifest.numbers.keys():
        above = [head for head in path_prefixes(path) if head and head in manifest.numbers]
        problems += [Problem(head, "is a leaf in the checkpoint") for head in above]
    if problems:
        raise MismatchError.of("item and checkpoint differ", problems)


def _standard(requested: Any, saved: TypedLeaf, *, support_layout: bool) -> Any:
    """Translate a leaf of a StandardRestore's item into a leaf of a target. Concrete leaves mean the same in both."""
    if isinstance(requested, (_metadata.ScalarMetadata, _metadata.StringMetadata)):
        return _translate_restore_args(ocp.RestoreArgs(), saved)
    arrays = (jax.ShapeDtypeStruct, _metadata.ArrayMetadata, *([jax.Array] if support_layout else []))
    if not isinstance(requested, arrays):
        return requested
    if requested.sharding is None and not saved.on_devices:
        return _translate_restore_args(
            ocp.RestoreArgs(restore_type=np.ndarray, dtype=requested.dtype), saved, requested
        )
    sharding = getattr(requested, "format", requested.sharding) if support_layout else requested.sharding
    return _translate_restore_args(ocp.ArrayRestoreArgs(sharding=sharding, dtype=requested.dtype), saved, requested)


def _translate_restore_args(restore_args: Any, saved: TypedLeaf, item: Any = None) -> Any:
    """Translate a leaf's RestoreArgs into a leaf of a target."""
    if saved.kind == "key":  # Orbax describes it by its raw data
        return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=_requested_sharding(restore_args))
    kind = _restored_type(restore_args, saved)
    shape, dtype = getattr(restore_args, "global_shape", None), restore_args.dtype
    if getattr(restore_args, "strict", False):  # the item supplies what ArrayRestoreArgs leave open
        shape = getattr(item, "shape", None) if shape is None else shape
        dtype = getattr(item, "dtype", None) if dtype is None else dtype
    if dtype is None:
        # A Python number becomes an array of JAX's default width. The restore checks that its value fits.
        is_number = kind is jax.Array and saved.kind in NUMBER_KINDS
        dtype = jax.dtypes.canonicalize_dtype(saved.dtype) if is_number else saved.dtype
    shape, dtype = saved.shape if shape is None else shape, np.dtype(dtype)
    if kind is jax.Array:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=_requested_sharding(restore_args))
    if kind is np.ndarray:
        return np.broadcast_to(np.empty((), dtype), shape)
    return np.zeros((), dtype)[()] if kind is np.generic else kind()  # pyright: ignore[reportCallIssue]


def _restored_type(restore_args: Any, saved: TypedLeaf) -> Any:
    """The type that RestoreArgs request: that of the saved leaf, jax.Array, np.ndarray, or the type of a scalar."""
    kind: Any = restore_args.restore_type
    if kind is None:
        return jax.Array if saved.on_devices else KINDS[saved.kind].type
    if isinstance(kind, type):
        for array_type in (jax.Array, np.ndarray):
            if issubclass(kind, array_type):
                return array_type
        if kind in PYTHON_KINDS or issubclass(kind, np.generic):
            return kind
    raise InputError(
        f"RestoreArgs(restore_type={kind!r}) of the leaf {saved.path!r}: restore_type must be jax.Array, np.ndarray,"
        f" the type of an array, or one of {', '.join(each.__name__ for each in PYTHON_KINDS)}; None restores the leaf"
        " as it was saved"
    )


def _requested_sharding(restore_args: Any) -> Any:
    """The sharding, or the Format with a layout, that RestoreArgs request; None for the saved sharding."""
    sharding = getattr(restore_args, "sharding", None)
    if sharding is None:
        mesh = getattr(restore_args, "mesh", None)
        return None if mesh is None else NamedSharding(mesh, restore_args.mesh_axes or PartitionSpec())
    return sharding.to_jax_sharding() if isinstance(sharding, _metadata.ShardingMetadata) else sharding


# Orbax's descriptions ---------------------------------------------------------------------------------------


def _describe_empty(node: Any) -> Any:
    """Orbax's description of an empty container."""
    return None if hasattr(node, "_fields") else node


def _described(saved: TypedLeaf, directory: Path) -> Any:
    """Orbax's description of a leaf. A PRNG key is described by its raw data."""
    name = saved.path.replace("/", ".")
    if saved.kind in ("str", "bytes"):
        return _metadata.StringMetadata(name, directory)
    if saved.kind not in ("jax", "key", "numpy"):
        return _metadata.ScalarMetadata(name, directory, dtype=saved.dtype)
    shape, dtype = saved.stored_shape, saved.stored_dtype
    return _metadata.ArrayMetadata(name, directory, shape, _describe_sharding(saved), dtype, _describe_storage(saved))


def _describe_storage(saved: TypedLeaf) -> Any:
    """Orbax's description of how the array of a leaf is stored: the shapes of its chunks and, for a jax.Array, of its
    objects."""
    stack = saved.stack
    return StorageMetadata(
        chunk_shape=stack.chunk_sides[1:], write_shape=stack.object_sides[1:] if saved.on_devices else None
    )


def _describe_sharding(saved: TypedLeaf) -> Any:
    """Orbax's description of the sharding of a saved jax.Array; None if its devices do not exist here."""
    if not saved.on_devices:
        return None
    layout = saved.record.layout
    try:
        sharding = None if layout is None else saved_sharding(saved.manifest, layout)
    except LayoutError:
        return None
    if isinstance(sharding, NamedSharding):  # without reduced mesh axes, which Orbax cannot describe
        sharding = NamedSharding(sharding.mesh, partition_spec(spec_of(sharding.spec)))
        return _metadata.NamedShardingMetadata.from_jax_sharding(sharding)
    sharding = sharding or SingleDeviceSharding(jax.local_devices()[0])
    return _metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding)
