"""Forking a run: a step of it becomes the first step of another run, without a copy of its data."""

from __future__ import annotations

import contextlib
import functools
from typing import NoReturn

from jaxckpt._model import zarr
from jaxckpt._model.file_names import MANIFEST
from jaxckpt._model.manifest import state_file_name
from jaxckpt._options import Options
from jaxckpt._pipeline.lane_log import log as _log
from jaxckpt._pipeline.lanes import run_to_the_end
from jaxckpt._run_folder.metrics import add_metrics, read_added_metrics
from jaxckpt._run_folder.steps import step_folders, step_name
from jaxckpt._sources.open_source import source_at, step_of
from jaxckpt._sources.source import NativeCheckpoint
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import Path, store_at
from jaxckpt._store.transaction import begin
from jaxckpt.errors import (
    CheckpointExistsError,
    DataError,
    InputError,
    NotACheckpointError,
    StorageError,
    show_count,
)


def fork_step(path: Path, new_run: Path, options: Options) -> int:
    """Start a new run from the step at a path. Returns its number. Raises as `Run.fork`."""
    source, run, number = step_of(source_at(path, options), "give a run, or one of its steps")
    new = store_at(new_run, options).absolute()
    steps = [] if new.is_file() else step_folders(new)[0]
    if steps or new.is_file() or MANIFEST in new.names() or new.published_data():
        state = (
            f"has {show_count(len(steps), 'step')}" if steps else "is a file" if new.is_file() else "is a checkpoint"
        )
        raise CheckpointExistsError(f"{new.url} {state}: give a folder that is new or empty")
    if source.manifest.step is not None and (dropped := source.manifest.step.dropped):
        _log.warning(
            "the fork of %s is without %s, which keep_last_of has deleted there; restore_or_init(init, strict=False)"
            " takes it from init",
            source.store.url,
            ", ".join(map(repr, dropped)),
        )
    run_to_the_end(
        functools.partial(_fork, source, new.child(step_name(number)), options.sync), options.timeout_seconds
    )
    save_id = source.manifest.save_id
    if added := read_added_metrics(run, [number]).get((number, save_id)):
        add_metrics(new, number, save_id, added, sync=options.sync)
    return number


def _fork(source: NativeCheckpoint, target: Store, sync: bool) -> None:
    """Link the objects of a checkpoint, write its small files again, and publish it."""
    manifest, content = load_manifest(source.store)
    data = manifest.data_folder
    with contextlib.closing(begin(target, manifest.save_id, None, manifest.decoded_stacks)) as transaction:
        for record, stack in zip(manifest.stacks, manifest.decoded_stacks, strict=True):
            for index, _ in stack.objects():
                key = f"{data}/{zarr.object_key(stack, index)}"
                length, _ = record.length_and_digest(index)
                try:
                    target.link(source.store, key, key, length, sync=False)  # as durable as in the source
                except StorageError:
                    _raise_link_error(source, target, key, length)
            if sync:
                target.sync_folders(data, stack, (index for index, _ in stack.objects()))
        for process, (length, _) in enumerate(manifest.process_states):
            key = f"{data}/{state_file_name(process)}"
            state = source.store.read(key)
            if state is None or len(state) != length:
                _raise_link_error(source, target, key, length)
            target.put(key, state, sync=sync)
        if sync:
            transaction.sync(manifest.decoded_stacks)
        transaction.commit(content, sync=sync)


def _raise_link_error(source: NativeCheckpoint, target: Store, key: str, length: int) -> NoReturn:
    """Raise the error that prevented a link to an object."""
    change = source.change_since_open()
    if change is not None:
        raise NotACheckpointError(f"the checkpoint at {change} while it was being forked")
    if problems := source.store.check_lengths({key: length}):
        raise DataError(f"{source.url}/{key} {problems[key]}")
    raise InputError(
        f"{source.url}/{key} cannot be linked to {target.url}: both must be on one file system that has hard links, and"
        f" the file must be yours. convert({source.url!r}, {target.url!r}) makes a copy instead"
    )
