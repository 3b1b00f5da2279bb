"""Repairs a checkpoint that has lost its manifest, from the second copy of the manifest."""

from __future__ import annotations

import contextlib
import hashlib

from jaxckpt._inspect.verify import VerifyReport, verify_files
from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import run_alone
from jaxckpt._run_folder.run_paths import resolve_step, steps_of
from jaxckpt._run_folder.steps import is_step
from jaxckpt._sources.source import NativeCheckpoint
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.lost_manifest import read_copy
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import Path, store_at
from jaxckpt.errors import CorruptError, DataError, JaxckptError, ManifestError, NotACheckpointError, show_count


def repair(path: Path, options: Options) -> list[VerifyReport]:
    """Restore `manifest.json` of a checkpoint, or of each step of a run, that has lost it. An intact manifest is never
    replaced.

    First checks the files that the copy names, as `verify(quick=True)` does. Returns the report on each repaired
    checkpoint: none if no manifest is lost or damaged. A step that cannot be repaired does not affect the others.

    Raises NotACheckpointError; ManifestError if there is no usable copy; DataError if files are missing; InputError if
    the path is read-only; StorageError.
    """
    store = store_at(path, options, to_write=True)
    if not store.names() and (step := resolve_step(store)) is not None:  # run@40
        store = step
    stores = [store] if store.published_data() else steps_of(store) or [store]
    reports: list[VerifyReport] = []
    failures: list[JaxckptError] = []
    for damaged in stores:
        if _is_intact(damaged):
            continue
        try:
            reports.append(_repair(damaged, options))
        except (CorruptError, NotACheckpointError) as failure:
            failures.append(failure)
    if len(stores) == 1 and failures:
        raise failures[0]
    if failures:
        repaired = f"; repaired: {', '.join(report.path for report in reports)}" if reports else ""
        what = show_count(len(failures), "step")
        raise ManifestError("\n".join([f"{what} of {store.url} cannot be repaired{repaired}", *map(str, failures)]))
    return reports


def _is_intact(store: Store) -> bool:
    """Whether a checkpoint has its manifest. Raises NotACheckpointError."""
    with contextlib.suppress(CorruptError):
        load_manifest(store)
        return True
    return False


def _repair(store: Store, options: Options) -> VerifyReport:
    try:
        data, content, manifest, damaged = read_copy(store)
    except ManifestError as error:
        raise ManifestError(f"{error}\n{_other_way_out(store)}") from error
    source = NativeCheckpoint(store, manifest, hashlib.sha256(content).hexdigest())
    report = run_alone(lambda: verify_files(source, True, options), options.timeout_seconds)
    if report.problems:
        raise DataError.of(
            f"{store.url} was not repaired, because {data} is damaged", report.problems, _other_way_out(store)
        )
    store.publish_copy(data, content, damaged, sync=options.sync)
    return report


def _other_way_out(store: Store) -> str:
    """What to do about a checkpoint that cannot be repaired."""
    above = store.parent_and_name()
    if above is not None and is_step(above[1]):
        return f"jaxckpt.Checkpointer({above[0].url!r}).delete({int(above[1])}) gives the step up"
    return f"jaxckpt.save({store.url!r}, …, overwrite=True) replaces the checkpoint"
