"""Converts between formats and layouts, in bounded memory.

source ─▶ its manifest, with the selected leaves ─▶ jaxckpt: a Draft whose values are read when an object is written
                                                 ─▶ other formats: leaf by leaf, slab by slab
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxckpt._arguments.specs import LeafGroup, Specs, assign_specs, mesh_axes, require_fit, resolve_specs
from jaxckpt._convert.convert_elsewhere import FilesElsewhere, WrittenElsewhere, require_plain
from jaxckpt._convert.convert_run import copy_notes, export_notes, hold_step, steps_to_convert, with_notes
from jaxckpt._devices.shardings import TypedLeaf
from jaxckpt._formats.average import Average
from jaxckpt._formats.destination import replacing, require_replaceable
from jaxckpt._formats.export import report_of
from jaxckpt._formats.live_export import write_folder
from jaxckpt._formats.safetensors import plan_safetensors
from jaxckpt._inspect.executors import OpenedElsewhere, require_executor
from jaxckpt._job.call import Call
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.grid import Layout, Spec, mesh_layout
from jaxckpt._model.paths import closest_hint
from jaxckpt._model.records import LayoutRecord, MeshRecord
from jaxckpt._model.select import Select
from jaxckpt._options import Options, require_bool
from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._pipeline.progress import Report, display_progress, log
from jaxckpt._restore.read_loop import StoredArray
from jaxckpt._rules.rename import Renaming, renamed_source
from jaxckpt._run_folder.steps import step_name
from jaxckpt._save.describe import Draft
from jaxckpt._save.request import SaveRequest
from jaxckpt._save.save import start
from jaxckpt._save.shared_path import SharedPath
from jaxckpt._save.write_plan import ArrayLeaf
from jaxckpt._sources.foreign import ForeignCheckpoint
from jaxckpt._sources.format_registry import missing_formats_hint, written_formats
from jaxckpt._sources.open_source import Location, NamedStep, source_at
from jaxckpt._sources.source import NativeCheckpoint, Source
from jaxckpt._store.storage_errors import translate_leaf_errors
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import local_path, store_at
from jaxckpt.errors import InputError, show_path


@explain_keywords
def convert(
    source: Location,
    destination: str | os.PathLike[str],
    *,
    format: str | None = None,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    specs: Specs = None,
    select: Select | None = None,
    rename: Renaming | None = None,
    chunk_bytes: int | None = None,
    overwrite: bool = False,
    executor: Executor | None = None,
    options: Options | None = None,
) -> None:
    """Convert a checkpoint or a whole run to a different format, mesh or chunk size, or to a subset of its leaves.

    Any host can do this: it needs no devices, and at most about `options.host_bytes` of memory in addition to Python
    and JAX. In a job of several processes, every process makes the call and process 0 writes. All write a folder of
    safetensors, each some of its files.

    Args:
        source: A checkpoint in any format that `restore` accepts, or the result of `rank_files`, `mindspore_ranks` or
            `oneflow_ranks`. The directory of a run, of a Checkpointer or of Orbax, is converted to a run: each step,
            with its number, metrics and metadata, oldest first; then the metadata of the run. A warning names what
            the format has no place for. If that is interrupted, the same call resumes it and skips the steps that are
            complete. If `keep_last_of` has dropped a subtree from some steps, pass functions in place of `specs`,
            `select` or `rename` that name it. "run@40" and "run@latest" refer to one step.
        destination: The path of the new checkpoint: as for `save`, or a local path for other formats.
        format: "jaxckpt"; "safetensors" (a file if `destination` ends in ".safetensors", otherwise a folder of shards
            with an index); "npz"; "zarr" (a group with one array per leaf); "orbax"; "orbax-v1", which `load` of Orbax
            v1 finds without a name. By default the destination's suffix decides: .safetensors, .npz, .zarr, or
            "jaxckpt" without a suffix. Any other suffix, such as .pt or .h5, is an error unless `format` is given.
        mesh: For "jaxckpt", the mesh for which leaves are laid out: axis sizes such as {"data": 4, "model": 2}, or a
            Mesh or AbstractMesh, of which only the axis sizes count. It decides how leaves are cut into objects, and
            the specs with which they are restored. By default the layout stays the same.
        specs: With `mesh`, the PartitionSpec of each array: one for all, a pytree prefix, or a function of (path,
            leaf). By default each leaf keeps its own spec, mapped by axis name; if the mesh has none of these axes, a
            SpecError is raised.
        select: Only these leaves, as for `restore`: by their paths after `rename`.
        rename: Old path → new path: a mapping of leaf or container paths, or a function; or `Rules`, as for
            `restore`. The tree becomes nested dicts, without empty containers and None.
        chunk_bytes: As `Options.chunk_bytes`.
        overwrite: Replace an existing `destination`: a checkpoint of any format, a file, or an empty folder. A folder
            that has other files or several steps, or that contains the source, is never deleted.
        executor: As for `verify`: its workers read and write. For "jaxckpt" and folders of safetensors.
        options: See `Options`.

    Raises:
        NotACheckpointError, CorruptError: As `restore`.
        StorageError: As `restore`; or `destination` cannot be written.
        SpecError: A spec does not fit its leaf or the mesh.
        TreeError: Leaves that the format cannot store; one error lists them. Or a pattern of `select` or a path of
            `rename` matches nothing.
        MismatchError: The `Rules` in `rename` do not fit the source.
        InputError: Another argument is invalid, such as `format` or a suffix that is not a format; or the source is a
            run, and the format has no runs.
        CheckpointExistsError: `destination` exists and `overwrite` is false, or it must not be deleted; or the
            destination of a run has steps of another run.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/convert", {"w": np.arange(3.0)}, overwrite=True)
        >>> jaxckpt.convert("/tmp/jaxckpt-doc/convert", "/tmp/jaxckpt-doc/convert.safetensors", overwrite=True)
        >>> jaxckpt.load_numpy("/tmp/jaxckpt-doc/convert.safetensors")
        {'w': array([0., 1., 2.])}
    """
    with Call.of("convert", destination, options) as call:
        if executor is None and isinstance(source, Average):
            executor = source.executor
        overwrite = require_bool(overwrite, "overwrite")
        options = call.options if chunk_bytes is None else replace(call.options, chunk_bytes=chunk_bytes)
        name = _checked_format(destination, format, mesh, specs, chunk_bytes, executor, options)
        conversion = _Conversion(name, mesh, specs, select, rename, options, overwrite, executor)
        find_steps = functools.partial(
            steps_to_convert,
            source,
            destination,
            name,
            functools.partial(renamed_source, rename=rename, select=select),
            options,
            overwrite=overwrite,
        )
        steps = call.in_process_0("listing the steps of the source", find_steps)
        if steps is None:
            _convert(call, conversion, source, source_at(source, options), destination)
            return
    assert not isinstance(source, ForeignCheckpoint)
    _convert_run(conversion, store_at(source, options), steps, destination)


@dataclass(frozen=True, slots=True)
class _Conversion:
    """The arguments of a conversion, checked."""

    format: str
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None
    specs: Specs
    select: Select | None
    rename: Renaming | None
    options: Options
    overwrite: bool
    executor: Executor | None


def _checked_format(
    destination: str | os.PathLike[str],
    format: str | None,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None,
    specs: Specs,
    chunk_bytes: int | None,
    executor: Executor | None,
    options: Options,
) -> str:
    """The format to write, after a check of the arguments of `convert` as far as possible without the source. Raises
    InputError."""
    if specs is not None and mesh is None:
        raise InputError("convert(specs=…) needs mesh=: the sizes of the mesh axes that the specs name")
    target = local_path(destination, "destination")
    name = _format_of(os.fspath(destination).rstrip("/") if target is None else target, format)
    if name != "jaxckpt":
        if target is None:
            raise InputError(
                f"{name!r} is written to a local path, but {os.fspath(destination)!r} looks like a URL: write it to a"
                " local path, then copy it"
            )
        if chunk_bytes is not None and name != "zarr":
            raise InputError(f"convert(chunk_bytes=…) has no effect on format {name!r}: leave it out")
        if mesh is not None:
            raise InputError(f"mesh= is for format 'jaxckpt'; {name!r} has no layout on a mesh")
    if executor is not None:
        require_executor(executor)
        require_plain(options)
        is_file = os.fspath(destination).endswith(".safetensors")
        if name not in ("jaxckpt", "safetensors") or is_file:
            what = "a .safetensors file" if is_file else f"format {name!r}"
            raise InputError(
                f"convert(executor=…) has no effect on {what}, which one process writes: leave it out. Workers write"
                ' "jaxckpt" and folders of safetensors'
            )
    return name


def _convert(
    call: Call,
    conversion: _Conversion,
    location: Location,
    source: NativeCheckpoint | ForeignCheckpoint,
    destination: str | os.PathLike[str],
    *,
    opened_step: NativeCheckpoint | ForeignCheckpoint | None = None,
) -> None:
    """Convert one checkpoint; to a step with `opened_step`, the source without the notes of its run. Every process."""
    options = conversion.options
    narrow = renamed_source(source, conversion.rename, conversion.select)
    verify = functools.partial(_verify_checksums, narrow, options)
    opened = functools.partial(
        OpenedElsewhere.of, opened_step or source, location, options, conversion.rename, conversion.select
    )
    if conversion.format == "jaxckpt":
        call.in_process_0("verifying the source", verify)
        draft = _drafted(narrow, conversion.mesh, conversion.specs, options)
        path = SharedPath.at(destination, options, overwrite=conversion.overwrite)
        if conversion.executor is not None:
            path = WrittenElsewhere(path.store, conversion.executor, opened(), overwrite=conversion.overwrite)
            options = replace(options, progress=None)  # the destination shows it
        manifest = narrow.manifest
        request = SaveRequest(path, options, metadata=manifest.metadata, draft=draft, step=manifest.step)
        start(request, call, background=False).wait()
        return
    target = local_path(destination)
    assert target is not None
    is_folder = conversion.format == "safetensors" and not target.endswith(".safetensors")
    if is_folder and (call.count > 1 or conversion.executor is not None):
        plan_folder = plan_safetensors
        if conversion.executor is not None:
            plan_folder = FilesElsewhere(call, conversion.executor, opened()).plan
        call.in_process_0("verifying the source", verify)
        write = functools.partial(
            write_folder, call, narrow, location, target, plan_folder, options, overwrite=conversion.overwrite
        )
        call.run(write)
        return
    form = written_formats()[conversion.format]
    write_format = form.write if opened_step is None else form.write_step
    assert write_format is not None, form.name
    write = functools.partial(
        _write_foreign, call, narrow, location, target, write_format, options, overwrite=conversion.overwrite
    )
    call.in_process_0("converting", write)


def _convert_run(
    conversion: _Conversion, run: Store, steps: Sequence[int], destination: str | os.PathLike[str]
) -> None:
    """Convert steps of a run, each in a call of its own, and copy the notes on the run. Every process."""
    directory = os.fspath(destination).rstrip("/")
    left_out = set[str]()
    for number, step in enumerate(steps, 1):
        name = step_name(step) if conversion.format == "jaxckpt" else str(step)
        with (
            Call.of("convert", f"{directory}/{name}", conversion.options) as call,
            contextlib.ExitStack() as until_converted,
        ):
            hold = functools.partial(hold_step, run, step, conversion.options, until_converted)
            if not call.in_process_0("holding a step of the source", hold):
                log.warning("step %d of %s was deleted before it could be converted", step, run.url)
                continue
            location = NamedStep(run, str(step))
            opened = source_at(location, conversion.options)
            source, others = with_notes(opened, run, step)
            left_out |= others
            _convert(call, conversion, location, source, f"{directory}/{name}", opened_step=opened)
            if call.index == 0:
                log.info("converted step %d of %s (%d of %d)", step, run.url, number, len(steps))
    with Call.of("convert", directory, conversion.options) as call:
        if conversion.format == "jaxckpt":
            copy = functools.partial(copy_notes, run, store_at(directory, conversion.options), conversion.options)
        else:
            target = local_path(directory)
            assert target is not None
            copy = functools.partial(export_notes, run, target, conversion.format, conversion.options)
        left_out |= {*(call.in_process_0("copying the notes on the run", copy) or ())}
        if left_out and call.index == 0:
            log.warning("%s lacks, because it has no place for them: %s", directory, "; ".join(sorted(left_out)))


def _write_foreign(
    call: Call,
    source: Source,
    location: Location,
    target: str,
    write_format: Callable[[Source, str, Options, Report], None],
    options: Options,
    *,
    overwrite: bool,
) -> None:
    """Write a checkpoint in another library's format. Process 0."""
    check = report_of(call)

    def report(moved: int) -> None:
        check(moved)
        display(moved)

    with call.watchdog.operation(f"converting {source.url} to {target}"):
        if os.path.lexists(target):
            require_replaceable(target, location, overwrite)
        _verify_checksums(source, options)
        n_bytes = sum(map(source.manifest.leaf_bytes, source.manifest.leaves))
        with replacing(target) as path, display_progress("convert", n_bytes, options.progress) as display:
            write_format(source, path, options, report)
            report(0)


def _verify_checksums(source: Source, options: Options) -> None:
    """Verify all data of a foreign checkpoint with the checksums of its format, because the written data gets new
    checksums. Process 0."""
    if not isinstance(source, ForeignCheckpoint):
        return
    for leaf in source.manifest.leaves:
        if leaf.stack is not None:
            stack, row = source.manifest.stack_and_row(leaf)
            with translate_leaf_errors(f"cannot convert leaf {show_path(leaf.path)}", [leaf.path]):
                run_watched(f"reading {source.url}", options.timeout_seconds, source.row_data[stack][row].check)


def _format_of(destination: str, format: str | None) -> str:
    """The format to write: the requested one, or the one of the destination's suffix."""
    written = written_formats()
    names = ["jaxckpt", *sorted(written)]
    by_suffix = {suffix: form.name for form in written.values() for suffix in form.suffixes}
    suffix = os.path.splitext(destination)[1]
    if format is not None:
        if not isinstance(format, str) or format not in names:  # pyright: ignore[reportUnnecessaryIsInstance]
            hint = closest_hint(str(format), names)
            if str(format).lower() in ("huggingface", "hf", "transformers"):
                hint = "; did you mean 'safetensors'? Hugging Face's folders have that format"
            raise InputError(f"format={format!r}{hint}; expected one of {', '.join(names)}{missing_formats_hint()}")
        if (suggested := by_suffix.get(suffix, format)) != format:
            raise InputError(
                f"destination {destination!r} ends in {suffix}, which is format {suggested!r}, but format={format!r}:"
                " leave out format=, or give a path without this suffix"
            )
        return format
    if suffix not in by_suffix and re.fullmatch(r"\.[A-Za-z]\w*", suffix):  # "run-1.5" has a number, not a suffix
        raise InputError(
            f"destination {destination!r} ends in {suffix}: jaxckpt does not write that format. The suffixes that it"
            f" knows are {', '.join(by_suffix)}; with any other, pass format= with one of {', '.join(names)}"
            f"{missing_formats_hint()}"
        )
    return by_suffix.get(suffix, "jaxckpt")


# To jaxckpt's format --------------------------------------------------------------------------------------


def _drafted(
    source: Source, mesh: Mesh | AbstractMesh | Mapping[str, int] | None, specs: Specs, options: Options
) -> Draft:
    """The checkpoint as a tree to be saved, laid out for the requested mesh, or for its saved mesh.

    Process 0 is the only holder of all cells, and writes everything. Raises SpecError.
    """
    manifest = source.manifest
    draft = Draft(manifest.tree)
    table = draft.table
    table.meshes, table.layouts = list(manifest.meshes), list(manifest.layouts)
    leaves = [TypedLeaf(manifest, record) for record in manifest.leaves]
    axes, chosen = None, dict[str, Spec]()
    if mesh is not None:
        axes = mesh_axes(mesh)
        on_devices = {leaf.path: leaf for leaf in leaves if leaf.on_devices}
        requested_specs = resolve_specs(specs, list(on_devices.items()))
        groups = [
            LeafGroup([path], leaf.shape, leaf.spec, requested_specs.get(path)) for path, leaf in on_devices.items()
        ]
        fitted, problems = assign_specs(axes, groups, options)
        require_fit(problems)
        chosen = dict(zip(on_devices, fitted, strict=True))
        table.meshes = [MeshRecord.of_axes(tuple(axes.items()))]
        table.layouts = []
    for number, leaf in enumerate(leaves):
        layout = leaf.record.layout
        if leaf.is_array:
            shape, leaf_axes, spec = leaf.stored_shape, None, leaf.spec
            if leaf.on_devices:
                leaf_axes, record = leaf.mesh and leaf.mesh.axes, manifest.leaf_layout(leaf.record)[2]
                if axes is not None:
                    leaf_axes, spec = axes, chosen[leaf.path]
                    record = LayoutRecord(0, [list(entry) for entry in spec], memory=record.memory)
                if record not in table.layouts:
                    table.layouts.append(record)
                layout = table.layouts.index(record)
            cells = Layout((1,) * len(shape), ((0,),))
            if leaf_axes is not None and 0 not in shape:
                cells = mesh_layout(np.zeros(tuple(leaf_axes.values()), np.int64), list(leaf_axes), spec, len(shape))
            if number in manifest.ties:
                draft.ties[number] = manifest.ties[number]
            else:
                draft.arrays.append(ArrayLeaf(number, leaf.stack.dtype, shape, cells))
                draft.values[number] = StoredArray(source, number, options)
        draft.records.append(msgspec.structs.replace(leaf.record, stack=None, row=None, layout=layout))
    return draft
