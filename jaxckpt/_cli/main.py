"""The command line: each command asks a public function, and shows what it says as a table or as JSON."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import click

from jaxckpt._cli.arguments import (
    Rule,
    complete_leaf,
    debug_option,
    indexed,
    json_option,
    location,
    mesh_option,
    n_bytes,
    old_and_new,
    require_mesh,
    select_option,
    selected,
    spec_tree,
    specs_option,
)
from jaxckpt._cli.listing import list_checkpoints, listing_record, print_listing
from jaxckpt._cli.results import (
    delta_record,
    plan_record,
    print_delta,
    print_plan,
    print_verification,
    verification_record,
)
from jaxckpt._cli.terminal import print_json, printable
from jaxckpt._cli.tree_view import describe, print_tree, print_value, read_value, save_npy, tree_record, value_record
from jaxckpt._foreign.convert import convert as convert_checkpoint
from jaxckpt._foreign.convert import integrate as integrate_ranks
from jaxckpt._format.names import MANIFEST
from jaxckpt._inspect.checkpoint import open as open_checkpoint
from jaxckpt._inspect.diff import diff as diff_checkpoints
from jaxckpt._inspect.report import report as report_on
from jaxckpt._inspect.verify import verify as verify_checkpoint
from jaxckpt._runtime.errors import CheckpointExistsError, CorruptError, InputError, JaxckptError, NotACheckpointError
from jaxckpt._runtime.options import Options
from jaxckpt._steps.pins import pin as pin_step
from jaxckpt._steps.pins import unpin as unpin_step
from jaxckpt._storage.place import local_path, store_at
from jaxckpt._storage.steps import steps_of

NO, BAD_INPUT, DAMAGED, NOT_THERE, STORAGE, BUG = 1, 2, 3, 4, 5, 70
INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE

_EXIT_CODES = """\b
Exit codes:
  0    all is well
  1    the answer is no: verify found problems, diff found differences,
       rm was not confirmed
  2    bad arguments, or a destination that is there already
  3    the checkpoint is damaged
  4    there is no checkpoint at the path
  5    the file system or object store refused
  70   a bug of jaxckpt
  130  interrupted (Ctrl-C)
  141  nobody reads the output any more (| head)
"""


class _Program(click.Group):
    """Turns every error into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        with contextlib.suppress(AttributeError, ValueError):  # a stream that was put in their place may be any
            sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (click.ClickException, click.exceptions.Exit):
            raise
        except BrokenPipeError:
            # Whatever is still to be flushed at exit goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(BROKEN_PIPE) from None
        except (KeyboardInterrupt, click.Abort) as stop:
            # At a prompt click turns one into the other.
            interrupted = isinstance(stop, KeyboardInterrupt) or isinstance(stop.__context__, KeyboardInterrupt)
            click.echo("" if interrupted else "jaxckpt: not confirmed, nothing was done", err=True)
            raise click.exceptions.Exit(INTERRUPTED if interrupted else NO) from None
        except Exception as error:
            if ctx.meta.get("debug"):
                traceback.print_exc()
            message, exit_code = _told(error)
            click.echo(printable(f"jaxckpt: {message}", keep="\n"), err=True)
            raise click.exceptions.Exit(exit_code) from error
        return result


def _told(error: Exception) -> tuple[str, int]:
    """(message, exit code) of an error."""
    match error:
        case InputError() | CheckpointExistsError():
            return str(error).replace("pass overwrite=True to replace", "--overwrite replaces"), BAD_INPUT
        case CorruptError():
            return str(error), DAMAGED
        case NotACheckpointError():
            return str(error), NOT_THERE
        case JaxckptError() | OSError():
            return str(error), STORAGE
        case _:
            told = f"{type(error).__name__}: {error}".rstrip(": ")
            return f"unexpected {told}\nThis is a bug; --debug shows where.", BUG


@click.group(cls=_Program, epilog=_EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jaxckpt")
@debug_option
def main() -> None:
    """Look into jaxckpt checkpoints, check, compare, plan, convert and delete them.

    A PATH is a folder or file, or a URL such as s3://bucket/run1/00000100. Checkpoints of other libraries that jaxckpt
    opens are fine everywhere but in rm.
    """


def _options() -> Options:
    """With a bar on a terminal, and nothing where stderr is a file."""
    return Options(progress=sys.stderr.isatty())


# Looking --------------------------------------------------------------------------------------------------


@main.command()
@location("path")
@json_option
@debug_option
def ls(path: str, as_json: bool) -> None:
    """List the checkpoints in a folder: size, age, metrics.

    Nothing is changed, whatever a killed run has left. Of a checkpoint itself, it lists that alone.
    """
    found = list_checkpoints(path)
    if as_json:
        print_json(listing_record(path, found))
    else:
        print_listing(found)


@main.command()
@location("path")
@select_option
@click.option("--depth", type=click.IntRange(min=1), help="Show containers down to this level only.")
@click.option("--all", "every", is_flag=True, help="Show alike containers, such as layers, each by itself.")
@json_option
@debug_option
def show(path: str, select: tuple[str, ...], depth: int | None, every: bool, as_json: bool) -> None:
    """Show the tree: shapes, dtypes, specs and bytes. No array is read.

    \b
    jaxckpt show run1/00000100
    jaxckpt show run1/00000100 --select 'params/**/kernel' --depth 2
    """
    checkpoint = open_checkpoint(path)
    leaves = selected(checkpoint, select)
    if as_json:
        print_json(tree_record(checkpoint, leaves))
    else:
        print_tree(path, checkpoint, leaves, depth, every)


@main.command()
@location("path")
@click.argument("leaf", shell_complete=complete_leaf)
@click.option("--save", type=click.Path(dir_okay=False, path_type=str), help="Write it to a .npy file instead.")
@json_option
@debug_option
def cat(path: str, leaf: str, save: str | None, as_json: bool) -> None:
    """Print a leaf, or a part of it. Only the chunks that are touched are read.

    \b
    jaxckpt cat run1/00000100 step
    jaxckpt cat run1/00000100 'params/w[8:16, 0]'
    jaxckpt cat run1/00000100 params/w --save w.npy

    An index is of integers, slices and "...". A .npy file holds bfloat16 and other dtypes that NumPy lacks as float32,
    int4 as int8: no value is lost.
    """
    found, index = indexed(open_checkpoint(path), leaf)
    if save is not None:
        save_npy(found, index, save)
        if as_json:
            print_json({"path": path, "leaf": found.path, "saved": save})
        return
    value = read_value(found, index, leaf)
    if as_json:
        print_json(value_record(path, found, value))
    else:
        print_value(value)


@main.command()
@location("path")
@click.option("--quick", is_flag=True, help="Only whether each file is there and of its length.")
@json_option
@debug_option
def verify(path: str, quick: bool, as_json: bool) -> None:
    """Read every byte of a checkpoint and check it. Exit code 1 where anything is not as it was saved."""
    found = verify_checkpoint(path, quick=quick, options=_options())
    if as_json:
        print_json(verification_record(found, quick))
    else:
        print_verification(found)
    if not found.ok:
        raise click.exceptions.Exit(NO)


@main.command()
@location("a")
@location("b")
@select_option
@json_option
@debug_option
def diff(a: str, b: str, select: tuple[str, ...], as_json: bool) -> None:
    """Compare two checkpoints leaf by leaf. Meshes and formats do not matter; exit code 1 where they differ."""
    found = diff_checkpoints(a, b, select=select or None, options=_options())
    if as_json:
        print_json(delta_record(found))
    else:
        print_delta(found)
    if not found.identical:
        raise click.exceptions.Exit(NO)


@main.command()
@location("path")
@mesh_option(required=True)
@specs_option
@select_option
@click.option(
    "--devices-per-process", type=click.IntRange(min=1), default=8, show_default=True, help="Devices of each process."
)
@json_option
@debug_option
def plan(
    path: str,
    mesh: Mapping[str, int],
    specs: Sequence[Rule],
    select: tuple[str, ...],
    devices_per_process: int,
    as_json: bool,
) -> None:
    """Tell what a restore onto a mesh would read. Nothing is read, and the mesh need not be here.

    \b
    jaxckpt plan run1/00000100 --mesh data=4,model=2
    jaxckpt plan run1/00000100 --mesh model=8 --specs 'params/**/kernel=P(None, "model")'
    """
    checkpoint = open_checkpoint(path)
    found = checkpoint.plan(
        mesh=mesh,
        specs=spec_tree(checkpoint, specs, select),
        select=select or None,
        devices_per_process=devices_per_process,
    )
    if as_json:
        print_json({"path": path, "mesh": mesh, **plan_record(found)})
    else:
        print_plan(found)


# Writing and deleting -------------------------------------------------------------------------------------


def _print_done(text: str, record: Mapping[str, Any], as_json: bool) -> None:
    """What a command that writes or deletes has done."""
    if as_json:
        print_json(record)
    else:
        click.echo(printable(text))


@main.command()
@location("source")
@location("destination")
@click.option(
    "--format", help="jaxckpt, safetensors, npz, zarr or orbax; by default it follows from DESTINATION's suffix."
)
@mesh_option()
@specs_option
@select_option
@click.option(
    "--rename", type=old_and_new, metavar="OLD=NEW", multiple=True, help="A leaf or container by its old and new path."
)
@click.option("--chunk-bytes", type=n_bytes, metavar="SIZE", help="Bytes of one chunk, about: 64KiB.")
@click.option("--overwrite", is_flag=True, help="Replace what is at DESTINATION.")
@json_option
@debug_option
def convert(
    source: str,
    destination: str,
    format: str | None,
    mesh: Mapping[str, int] | None,
    specs: Sequence[Rule],
    select: tuple[str, ...],
    rename: tuple[tuple[str, str], ...],
    chunk_bytes: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write anew in another format or layout, or only some leaves.

    \b
    jaxckpt convert run1/00000100 model.safetensors --select params
    jaxckpt convert run1/00000100 for-serving --mesh model=8 --chunk-bytes 64KiB
    """
    require_mesh(mesh, specs)
    convert_checkpoint(
        source,
        destination,
        format=format,
        mesh_shape=mesh,
        specs=spec_tree(open_checkpoint(source), specs, select, dict(rename)) if specs else None,
        select=select or None,
        rename=dict(rename) or None,
        chunk_bytes=chunk_bytes,
        overwrite=overwrite,
        options=_options(),
    )
    _print_done(f"{source} → {destination}", {"source": source, "destination": destination}, as_json)


@main.command()
@location("path")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=str), required=True, help="The file to write, .html."
)
@mesh_option()
@specs_option
@click.option("--histograms", is_flag=True, help="Also read the arrays, and draw how their values are distributed.")
@json_option
@debug_option
def report(
    path: str, output: str, mesh: Mapping[str, int] | None, specs: Sequence[Rule], histograms: bool, as_json: bool
) -> None:
    """Draw a checkpoint: one HTML file, which needs no network and no other file.

    With --mesh it also shows what a restore onto that mesh would read.
    """
    require_mesh(mesh, specs)
    _require_outside(output, path)
    rules = spec_tree(open_checkpoint(path), specs) if specs else None
    page = report_on(path, mesh=mesh, specs=rules, histograms=histograms, options=_options())
    _write_text(output, page)
    _print_done(output, {"path": path, "output": output}, as_json)


def _require_outside(output: str, path: str) -> None:
    """Raise InputError if a file would be written over the checkpoint at a path, or into its folder."""
    folder = local_path(path)
    if folder is None:
        return
    folder, written = os.path.realpath(folder), os.path.realpath(output)
    if written == folder or written.startswith(os.path.join(folder, "")):
        raise InputError(f"{output} is in the checkpoint {path}: give a file outside of it")


def _write_text(path: str, text: str) -> None:
    """Write a file that takes the place of another only once it is complete."""
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):  # /dev/stdout, for example
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    draft = f"{path}.{os.getpid()}.tmp"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)


@main.command()
@click.argument("old")
@location("new")
@location("strategy")
@click.argument("n", type=click.IntRange(min=1))
@click.option("--overwrite", is_flag=True, help="Replace what is at NEW.")
@json_option
@debug_option
def integrate(old: str, new: str, strategy: str, n: int, overwrite: bool, as_json: bool) -> None:
    """Merge the files of MindSpore's ranks, as its tutorial's integrate_checkpoint.py does with the same arguments.

    OLD is the name that the files of all ranks have: ./node0/OLD, ./node1/OLD, …; NEW is where the checkpoint goes,
    STRATEGY the strategy file, protobuf or JSON, and N how many ranks there are.
    """
    integrate_ranks(old, new, strategy, n, overwrite=overwrite)
    _print_done(f"{old} → {new}", {"source": old, "destination": new}, as_json)


@main.command()
@location("path")
@click.option("--name", required=True, help="Letters, digits, '_', '-' and '.'; the step is PATH's run@NAME then.")
@json_option
@debug_option
def pin(path: str, name: str, as_json: bool) -> None:
    """Give a step of a run a name; no rule of a Checkpointer deletes a step that has one."""
    step = pin_step(path, name)
    run = open_checkpoint(path).path.rpartition("/")[0]
    _print_done(f"{run}@{name} is step {step}", {"path": path, "name": name, "step": step}, as_json)


@main.command()
@location("path")
@json_option
@debug_option
def unpin(path: str, as_json: bool) -> None:
    """Take the name of a pinned step, such as run@paper, back."""
    unpin_step(path)
    _print_done(f"{path} is no longer pinned", {"path": path}, as_json)


@main.command()
@location("path")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@debug_option
def rm(path: str, yes: bool, as_json: bool) -> None:
    """Delete a jaxckpt checkpoint, such as a step of a run.

    Its manifest goes first: a reader finds the checkpoint whole, or finds that it is not there. Files that are not
    jaxckpt's own are left.
    """
    options = Options()
    if (steps := steps_of(store_at(path, options))) is not None:
        raise InputError(f"{path} is the directory of a run: name the step to delete, as in {steps[-1].url}")
    checkpoint = open_checkpoint(path)
    if checkpoint.format != "jaxckpt":  # it may have files that are not ours to know
        raise InputError(f"{checkpoint.path} is a checkpoint of format {checkpoint.format}; rm deletes jaxckpt's only")
    path = checkpoint.path if "@" in path else path
    store = store_at(path, options)
    if store.read(MANIFEST) is None:
        raise InputError(
            f"{path} belongs to Orbax's CheckpointManager, which deletes its steps itself; only {checkpoint.path} in it"
            " was written by jaxckpt"
        )
    if not yes:
        what = next(describe(checkpoint, checkpoint.leaves))
        click.confirm(printable(f"delete {path} ({what})?"), abort=True, err=True)
        again = open_checkpoint(path)
        if again.save_id != checkpoint.save_id:
            raise InputError(f"{path} was saved anew meanwhile, and is not deleted")
    if store.read(MANIFEST) is None:
        raise NotACheckpointError(f"{path} was deleted meanwhile")
    store.unpublish(sync=options.sync)
    store.clear()
    above, _, name = path.rstrip("/").rpartition("/")
    # An object store keeps a list of steps; this one may have been published again meanwhile.
    if "://" in above and local_path(path) is None and store.read(MANIFEST) is None:
        store_at(above, options).unmark(name)
    left = store.names()
    _print_done(f"deleted {path}", {"path": path, "left": left}, as_json)
    if left:
        click.echo(printable(f"left there, as not of this checkpoint: {', '.join(left[:5])}"), err=True)
