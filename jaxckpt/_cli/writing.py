"""The commands that write or delete, from `convert` to `rm`."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import click

from jaxckpt._cli.arguments import SpecRule, renames, require_mesh_for_specs
from jaxckpt._cli.inputs import progress_options, require_writable, rules_of, spec_tree, worker_processes
from jaxckpt._cli.terminal import print_done, printable, replacing_file
from jaxckpt._cli.tree_view import describe
from jaxckpt._convert.convert import convert as convert_checkpoint
from jaxckpt._formats.average import average as averaged
from jaxckpt._formats.peft import merge_lora as merged
from jaxckpt._inspect.open import Checkpoint
from jaxckpt._inspect.open import open as open_checkpoint
from jaxckpt._inspect.report import report as report_on
from jaxckpt._inspect.verify import repair as repair_manifests
from jaxckpt._inspect.verify import repair_remedy
from jaxckpt._model.file_names import MANIFEST, is_data_folder, is_data_referenced
from jaxckpt._options import Options
from jaxckpt._run_folder.leases import pin_step, pins, require_unpinned, unpin_name
from jaxckpt._run_folder.metrics import clear_step
from jaxckpt._run_folder.run_paths import resolve_step, run_and_name, steps_of
from jaxckpt._run_folder.steps import is_link, is_step, step_name
from jaxckpt._runs.run import fork_step
from jaxckpt._sources.open_source import source_at, step_of
from jaxckpt._store.store_path import store_at
from jaxckpt.errors import InputError, ManifestError, NotACheckpointError, StorageError


def convert(
    source: str,
    destination: str,
    format: str | None,
    mesh: Mapping[str, int] | None,
    specs: Sequence[SpecRule],
    select: Sequence[str],
    rename: Sequence[tuple[str, str]],
    rules: str | None,
    back_to: str | None,
    chunk_bytes: int | None,
    merge_lora: str | None,
    indivisible: Literal["error", "replicate"],
    overwrite: bool,
    workers: int | None,
    progress: bool,
    as_json: bool,
) -> None:
    require_mesh_for_specs(mesh, specs)
    if rules and rename:
        raise click.UsageError("--rules gives every leaf its name: it cannot be used together with --rename")
    renaming = rules_of(source, rules, back_to) or renames(rename) or None
    with worker_processes(workers) as executor:
        convert_checkpoint(
            source if merge_lora is None else merged(source, merge_lora),
            destination,
            format=format,
            mesh=mesh,
            specs=spec_tree(open_checkpoint(source, rename=renaming), specs, select) if specs else None,
            select=select or None,
            rename=renaming,
            chunk_bytes=chunk_bytes,
            overwrite=overwrite,
            executor=executor,
            options=replace(progress_options(progress), indivisible=indivisible),
        )
    print_done(f"{source} → {destination}", {"source": source, "destination": destination}, as_json)


def average(
    checkpoints: Sequence[str],
    weights: str | None,
    destination: str,
    format: str | None,
    select: Sequence[str],
    overwrite: bool,
    workers: int | None,
    progress: bool,
    as_json: bool,
) -> None:
    try:
        factors = None if weights is None else [*map(float, weights.split(","))]
    except ValueError:
        raise click.UsageError(f"--weights {weights!r} must be numbers with commas, such as 1,1,-1") from None
    source = averaged(checkpoints, weights=factors, select=select or None)
    options = progress_options(progress)
    with worker_processes(workers) as executor:
        convert_checkpoint(source, destination, format=format, overwrite=overwrite, executor=executor, options=options)
    print_done(f"{source.url} → {destination}", {"source": source.url, "destination": destination}, as_json)


def report(
    path: str,
    output: str,
    mesh: Mapping[str, int] | None,
    specs: Sequence[SpecRule],
    indivisible: Literal["error", "replicate"],
    histograms: bool,
    overwrite: bool,
    progress: bool,
    as_json: bool,
) -> None:
    require_mesh_for_specs(mesh, specs)
    require_writable(output, ".html", path, overwrite=overwrite)
    tree = spec_tree(open_checkpoint(path), specs) if specs else None
    options = replace(progress_options(progress), indivisible=indivisible)
    page = report_on(path, mesh=mesh, specs=tree, histograms=histograms, options=options)
    with replacing_file(output) as file:
        file.write(page.encode())
    print_done(output, {"path": path, "output": output}, as_json, written=output)


def integrate(old: str, new: str, strategy: str, n: int, overwrite: bool, progress: bool, as_json: bool) -> None:
    from jaxckpt._formats.mindspore import mindspore_ranks  # only this command needs it

    ranks = mindspore_ranks({rank: os.path.join(f"node{rank}", old) for rank in range(n)}, strategy=strategy)
    options = progress_options(progress)
    convert_checkpoint(ranks, new, format="jaxckpt", overwrite=overwrite, options=options)
    print_done(f"{old} → {new}", {"source": old, "destination": new}, as_json)


def repair(path: str, as_json: bool) -> None:
    try:
        reports = repair_manifests(path, Options())
    except NotACheckpointError:
        _require_own_format(open_checkpoint(path), "repair restores")  # otherwise it raises the same error
        raise
    repaired = [report.path for report in reports]
    text = "\n".join(f"repaired {report}" for report in reports)
    text = text or f"{path} has lost no metadata, and data is not repaired: jaxckpt verify finds what is damaged"
    print_done(text, {"path": path, "repaired": repaired}, as_json)


def _require_own_format(checkpoint: Checkpoint, what: str) -> None:
    if checkpoint.format != "jaxckpt":
        raise InputError(f"{checkpoint.path} is a checkpoint of format {checkpoint.format}; {what} only jaxckpt's own")


def pin(path: str, name: str, move: bool, as_json: bool) -> None:
    _, run, step = step_of(source_at(path, Options()), "a Checkpointer deletes only those")
    pin_step(run, step, name, Options(), move=move)
    above, _, last = path.rstrip("/").rpartition("/")
    if last == step_name(step):  # otherwise digits are the name of the run, such as its date
        run = above or "."
    else:
        run = path.rstrip("/").rpartition("@")[0] if "@" in last else path.rstrip("/")
    print_done(f"{run}@{name} is step {step}", {"path": path, "name": name, "step": step}, as_json)


def unpin(path: str, as_json: bool) -> None:
    store = store_at(path, Options())
    run, name = run_and_name(store) or (store, "")
    if not name:
        names = pins(run)
        example = f", as in {run.url}@{next(iter(names))}" if names else ""
        raise InputError(
            f"{path} has no name of a pin: give RUN@NAME{example}; pinned names: {', '.join(names) or 'none'}"
        )
    unpin_name(run, name)
    print_done(f"{path} is no longer pinned", {"path": path}, as_json)


def fork(run: str, new_run: str, as_json: bool) -> None:
    step = fork_step(run, new_run, Options())
    source = run.removesuffix(f"@{step}")
    print_done(
        f"{new_run} starts from step {step} of {source}", {"run": run, "new_run": new_run, "step": step}, as_json
    )


def rm(path: str, yes: bool, as_json: bool) -> None:
    options = Options()
    store = store_at(path, options)
    if (steps := steps_of(store)) is not None:
        raise InputError(f"{path} is the directory of a run: name the step to delete, as in {steps[-1].url}")
    try:
        checkpoint = open_checkpoint(path)
    except NotACheckpointError as error:
        above = store.parent_and_name()
        if above is not None and is_step(above[1]) and any(map(is_data_folder, store.names())):
            raise NotACheckpointError(f"{error}. The next Checkpointer of {above[0].url} deletes it") from error
        raise
    except ManifestError as error:
        damaged = store if store.names() else resolve_step(store)  # run@40
        raise ManifestError(f"{error}\n{repair_remedy(damaged or store)}") from error
    _require_own_format(checkpoint, "rm deletes")  # another may have files that jaxckpt does not know
    path = checkpoint.path if "@" in path else path
    store = store_at(path, options)
    if store.read(MANIFEST) is None:
        raise InputError(
            f"{path} belongs to Orbax's CheckpointManager, which deletes its steps itself; jaxckpt wrote only"
            f" {checkpoint.path} in it"
        )
    above = store.parent_and_name()
    run_and_step = (above[0], int(above[1])) if above is not None and is_step(above[1]) else None
    if run_and_step is not None:
        require_unpinned(*run_and_step)
    if not yes:
        summary = next(describe(checkpoint, checkpoint.leaves))
        link = "the link " if is_link(store) else ""
        click.confirm(printable(f"delete {link}{path} ({summary})?"), abort=True, err=True)
        again = open_checkpoint(path)
        if again.save_id != checkpoint.save_id:
            raise InputError(f"{path} was saved again in the meantime, so it was not deleted")
    if above is not None and is_link(store):  # its target may belong to another run
        above[0].remove(above[1])
        print_done(f"deleted the link {path}", {"path": path, "left": []}, as_json)
        return
    if (manifest := store.read(MANIFEST)) is None:
        raise NotACheckpointError(f"{path} was deleted in the meantime")
    store.unpublish(sync=options.sync)
    if run_and_step is None:
        store.clear()
    else:
        clear_step(*run_and_step)
    left = store.names()
    if remains := [name for name in left if is_data_folder(name) and is_data_referenced(manifest, name)]:
        raise StorageError(
            errno.ENOTEMPTY,
            f"{path} is no longer a checkpoint, but {remains[0]} in it could not be deleted completely: check who may"
            " delete its files, then delete it",
        )
    print_done(f"deleted {path}", {"path": path, "left": left}, as_json)
    if left:
        click.echo(printable(f"kept (not part of this checkpoint): {', '.join(left[:5])}"), err=True)
