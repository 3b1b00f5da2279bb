"""The command line: its commands and options, and how each error becomes a message and an exit code.

A command imports its work when it runs. `--help` and `--version` need no other library, and commands that only read
jaxckpt's own checkpoints do not import JAX.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import click

from jaxckpt._cli.arguments import (
    FORMATS,
    SORTS,
    LocalPath,
    back_to_option,
    complete_format,
    complete_leaf,
    debug_option,
    indivisible_option,
    json_option,
    location,
    mesh_option,
    output_option,
    overwrite_option,
    parse_rate,
    parse_rename,
    parse_size,
    progress_option,
    rules_option,
    select_option,
    similar_path_hint,
    specs_option,
    workers_option,
)
from jaxckpt._cli.terminal import printable
from jaxckpt.errors import (
    CheckpointExistsError,
    CorruptError,
    InputError,
    JaxckptError,
    NotACheckpointError,
    UnsupportedError,
)

NEGATIVE, BAD_INPUT, DAMAGED, NOT_FOUND, STORAGE, UNSUPPORTED, BUG = 1, 2, 3, 4, 5, 6, 70
INTERRUPTED, BROKEN_PIPE = 130, 141  # the codes that shells report for SIGINT and SIGPIPE

_EXIT_CODES = """\b
Exit codes:
  0    success
  1    verify found problems, diff found differences, or the deletion by
       rm was not confirmed
  2    invalid arguments, or the destination already exists
  3    the checkpoint is damaged
  4    the path is not a checkpoint
  5    the file system or object store reported an error
  6    jaxckpt cannot read a leaf, although it is not damaged
  70   a bug in jaxckpt
  130  interrupted (Ctrl-C)
  141  the program that reads the output has closed it (| head)
"""


class _Command(click.Command):
    """A command in which an option that takes one value is given at most once. click would use the last value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            *_, order = self.make_parser(ctx).parse_args(list(args))
            for option, count in collections.Counter(order).items():
                is_single = isinstance(option, click.Option) and not (option.multiple or option.is_flag)
                if is_single and count > 1:
                    name = option.opts[-1]
                    usage = f", as {name} {option.metavar}" if option.metavar else ""
                    raise click.UsageError(f"{name} takes one value, but was given {count} times: give it once{usage}")
        return super().parse_args(ctx, args)


def _has_option(command: click.Command | None, name: str) -> bool:
    return command is not None and any(name in parameter.opts for parameter in command.params)


class _Program(click.Group):
    """Turns every error into a message and an exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            takers = [word for word in (*args, *self.commands) if _has_option(self.commands.get(word), name)]
            if not takers:
                raise
            example = f"jaxckpt {takers[0]} {name}"
            message = f"{name} is an option of commands: write it after the command, as in {example}"
            raise click.UsageError(message, ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        # Python has no object for a stream that was closed when the program started, as by >&- in a shell.
        sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
        with contextlib.suppress(AttributeError, ValueError):  # a replaced stream may lack the method
            sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (click.ClickException, click.exceptions.Exit):
            raise
        except BrokenPipeError:
            # Discard everything that would be flushed at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(BROKEN_PIPE) from None
        except (KeyboardInterrupt, click.Abort) as stop:
            # At a prompt, click turns KeyboardInterrupt into Abort.
            interrupted = isinstance(stop, KeyboardInterrupt) or isinstance(stop.__context__, KeyboardInterrupt)
            click.echo("" if interrupted else "jaxckpt: not confirmed, nothing was deleted", err=True)
            raise click.exceptions.Exit(INTERRUPTED if interrupted else NEGATIVE) from None
        except Exception as error:
            if ctx.meta.get("debug"):
                traceback.print_exc()
            paths = ctx.meta.get("paths", [])
            message, exit_code = _message(error, paths)
            if exit_code == NOT_FOUND:
                named = [path for path in paths if path in message] or paths
                message += next(filter(None, map(similar_path_hint, named)), "")
            click.echo(printable(f"jaxckpt: {message}", keep="\n"), err=True)
            raise click.exceptions.Exit(exit_code) from error
        return result


_PYTHON_HINTS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"pass overwrite=True to replace", "--overwrite replaces"),
    (r'pass Options\(indivisible="replicate"\) to keep it whole', "pass --indivisible replicate to keep it whole"),
    (
        r"(step \d+) of (.+): pass move=True, or unpin\('(.*)'\) first",
        lambda match: (
            f"{match[1]} of {match[2]}: pass --move, or run jaxckpt unpin {shlex.quote(f'{match[2]}@{match[3]}')} first"
        ),
    ),
    (r"specs=PartitionSpec\(\)", "--specs 'P()'"),
    (r"convert\(executor=…\)", "--workers"),
    (r"\b(select|rename|mesh|specs|format)=(?![\w(\"'…])", r"--\1"),
)
"""Hints of errors as regular expressions, and what a user of the command line does instead."""


def _message(error: Exception, paths: Sequence[str]) -> tuple[str, int]:
    """(message, exit code) of an error of a command with these paths."""
    match error:
        case InputError() | CheckpointExistsError():
            text = str(error)
            for python, shell in _PYTHON_HINTS:
                text = re.sub(python, shell, text)
            return text, BAD_INPUT
        case UnsupportedError():
            return re.sub(r"\bselect=", "--select", str(error)), UNSUPPORTED
        case CorruptError():
            folders = {path: _folder_of(path) for path in reversed(paths)}
            damaged = [path for path in folders if os.path.join(folders[path], "") in str(error)]
            path = max(damaged or [paths[0] if paths else "PATH"], key=lambda path: len(folders.get(path, "")))
            return str(error).replace("run jaxckpt.verify for", f"run jaxckpt verify {shlex.quote(path)} for"), DAMAGED
        case NotACheckpointError():
            return str(error), NOT_FOUND
        case JaxckptError() | OSError():
            return str(error), STORAGE
        case _:
            description = f"{type(error).__name__}: {error}".rstrip(": ")
            return f"unexpected {description}\nThis is a bug; --debug shows where.", BUG


def _folder_of(path: str) -> str:
    """The folder of a path's step, or of its run if the step has a name, as errors show it."""
    run, _, step = path.rpartition("@")
    folder = path if not run or "/" in step else f"{run}/{int(step):08d}" if step.isdecimal() else run
    return folder if "://" in folder else os.path.abspath(folder)


@click.group(cls=_Program, epilog=_EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jaxckpt")
@debug_option
def main() -> None:
    """Inspect, verify, compare, convert and delete jaxckpt checkpoints.

    A PATH is a folder or file, or a URL such as s3://bucket/run1/00000100. For the run run1, run1@100 is step 100;
    run1@latest and run1@best also work. Most commands also accept checkpoints of other libraries that jaxckpt can open.
    """


def _command(module: str, *options: Callable[[Any], Any]) -> Callable[[Callable[[], None]], click.Command]:
    """A command with these arguments and options. The function of the same name in a module of `_cli` does the work.

    That module is imported when the command runs. If the function returns False, the exit code is 1.
    """

    def command(stub: Callable[[], None]) -> click.Command:
        def run(**arguments: Any) -> None:
            implementation = getattr(importlib.import_module(f"jaxckpt._cli.{module}"), stub.__name__)
            if implementation(**arguments) is False:
                raise click.exceptions.Exit(NEGATIVE)

        run.__doc__ = stub.__doc__
        for option in (debug_option, json_option, *reversed(options)):
            run = option(run)
        return main.command(stub.__name__, cls=_Command)(run)

    return command


# Inspecting -----------------------------------------------------------------------------------------------


@_command("listing", location("path"))
def ls() -> None:
    """List the checkpoints in a folder: size, age, metrics.

    Only the manifests are read, so damaged data is not found: verify does that. Nothing is changed: unfinished saves of
    a killed run are not deleted. If PATH is itself a checkpoint, only that is listed.
    """


@_command(
    "tree_view",
    location("path"),
    select_option,
    rules_option,
    back_to_option,
    click.option("--depth", type=click.IntRange(min=1), help="Show at most this many levels of containers."),
    click.option("--all", "every", is_flag=True, help="Show identical containers, such as layers, one by one."),
    click.option("--flat", is_flag=True, help="Show one table of all leaves with their paths, without containers."),
    click.option(
        "--details",
        is_flag=True,
        help="Also show when and by which versions it was saved, and the host, bytes and seconds of each process.",
    ),
    click.option(
        "--sort",
        type=click.Choice(SORTS),
        help="Sort the children of each container: by name, numbers by value, or by bytes, largest first. With --flat"
        " or --json, sort all leaves. By default, they are in the order of the saved tree.",
    ),
)
def show() -> None:
    """Show the tree: shapes, dtypes, specs and bytes. No arrays are read.

    \b
    jaxckpt show run1/00000100
    jaxckpt show run1/00000100 --select 'params/**/kernel' --depth 2
    """


@_command(
    "tree_view",
    location("path"),
    click.argument("leaf", shell_complete=complete_leaf),
    click.option(
        "--save", type=LocalPath(dir_okay=False, path_type=str), help="Write the array to this .npy file instead."
    ),
    click.option("--overwrite", is_flag=True, help="With --save: replace an existing file."),
    progress_option,
)
def cat() -> None:
    """Print a leaf or a part of it. Only the necessary chunks are read.

    \b
    jaxckpt cat run1/00000100 step
    jaxckpt cat run1/00000100 'params/w[8:16, 0]'
    jaxckpt cat run1/00000100 params/w --save w.npy

    An index consists of integers, slices and "...". A .npy file stores dtypes that NumPy does not have in a larger
    dtype, without loss: bfloat16 as float32, int4 as int8.
    """


@_command(
    "results",
    location("path"),
    click.option("--quick", is_flag=True, help="Check only that each file exists and has the expected size."),
    click.option(
        "--rate", type=parse_rate, metavar="SIZE", help="Read at most SIZE per second, with a unit, such as 50MiB."
    ),
    workers_option,
    progress_option,
)
def verify() -> None:
    """Read and check every byte of a checkpoint or a run. For a run, all steps are checked.

    The exit code is 1 if there are problems.
    """


@_command(
    "results",
    location("a"),
    location("b"),
    select_option,
    rules_option,
    back_to_option,
    click.option("--leaves-only", is_flag=True, help="Exit with 0 if all leaves are equal, even if containers differ."),
    workers_option,
    progress_option,
)
def diff() -> None:
    """Compare two checkpoints leaf by leaf. Meshes and formats may differ.

    The exit code is 1 if leaves or their containers differ: other types, keys or order.
    """


@_command(
    "results",
    location("path"),
    mesh_option(required=True),
    specs_option,
    select_option,
    rules_option,
    back_to_option,
    click.option(
        "--devices-per-process",
        type=click.IntRange(min=1),
        default=8,
        show_default=True,
        help="Number of devices per process.",
    ),
    indivisible_option,
)
def plan() -> None:
    """Show what a restore onto a mesh would read, without reading it.

    This machine does not need the devices of the mesh.

    \b
    jaxckpt plan run1/00000100 --mesh data=4,model=2
    jaxckpt plan run1/00000100 --mesh model=8 --specs 'params/**/kernel=P(None, "model")'
    """


# Writing and deleting -------------------------------------------------------------------------------------


@_command(
    "writing",
    location("source"),
    location("destination"),
    click.option(
        "--format",
        metavar=f"[{'|'.join(FORMATS)}]",
        shell_complete=complete_format,
        help="Format to write. By default DESTINATION's suffix determines it.",
    ),
    mesh_option(),
    specs_option,
    select_option,
    rules_option,
    back_to_option,
    click.option(
        "--rename",
        type=parse_rename,
        metavar="OLD=NEW",
        multiple=True,
        help="Rename a leaf or container. May be repeated.",
    ),
    click.option(
        "--chunk-bytes", type=parse_size, metavar="SIZE", help="Approximate size of one chunk, such as 64KiB."
    ),
    click.option("--merge-lora", metavar="ADAPTER", help="Merge a LoRA adapter of PEFT (a folder) into SOURCE."),
    indivisible_option,
    overwrite_option,
    workers_option,
    progress_option,
)
def convert() -> None:
    """Convert a checkpoint to another format or layout. --select extracts some of its leaves.

    \b
    jaxckpt convert run1/00000100 model.safetensors --select params
    jaxckpt convert run1/00000100 for-serving --mesh model=8 --chunk-bytes 64KiB
    jaxckpt convert Llama-3.1-8B run0 --rules maxtext --format orbax
    jaxckpt convert run9@latest exported --rules maxtext --back-to Llama-3.1-8B --format safetensors
    """


@_command(
    "writing",
    location("checkpoints", several=True),
    click.option("--weights", metavar="W1,W2,…", help="The factor of each checkpoint. By default 1 / count."),
    click.option("--output", "-o", "destination", required=True, metavar="DESTINATION", help="The new checkpoint."),
    click.option("--format", metavar=f"[{'|'.join(FORMATS)}]", shell_complete=complete_format, help="As for convert."),
    select_option,
    overwrite_option,
    workers_option,
    progress_option,
)
def average() -> None:
    """Write the weighted sum of checkpoints, computed in float32.

    RUN@last5 means the newest 5 steps of a run. Factors may be negative.

    \b
    jaxckpt average run1@last5 --select params -o averaged
    jaxckpt average tuned other base --weights 1,1,-1 -o merged --format safetensors
    """


@_command(
    "writing",
    location("path"),
    output_option,
    mesh_option(),
    specs_option,
    indivisible_option,
    click.option("--histograms", is_flag=True, help="Also read the arrays and show the distribution of their values."),
    overwrite_option,
    progress_option,
)
def report() -> None:
    """Write a report on a checkpoint as one self-contained HTML file.

    With --mesh the report also shows what a restore onto that mesh would read.
    """


@_command(
    "writing",
    click.argument("old"),
    location("new"),
    location("strategy"),
    click.argument("n", type=click.IntRange(min=1)),
    overwrite_option,
    progress_option,
)
def integrate() -> None:
    """Merge MindSpore rank files into one checkpoint.

    The arguments are those of integrate_checkpoint.py in MindSpore's tutorial: OLD is the file name of each rank
    (./node0/OLD, ./node1/OLD, …), NEW is the path of the new checkpoint, STRATEGY is the strategy file (protobuf or
    JSON), and N is the number of ranks.
    """


@_command("writing", location("path"))
def repair() -> None:
    """Restore the manifest of a checkpoint, or of each step of a run, that has lost it.

    The manifest is copied from its second copy, after a check that all files that it names exist and have the expected
    size. An intact manifest is never replaced. If only the second copy is missing or damaged, it is written again.
    """


@_command(
    "writing",
    location("path"),
    click.option("--name", required=True, help="Letters, digits, '_', '-' and '.', starting with a letter."),
    click.option("--move", is_flag=True, help="Take the name from the step that has it now."),
)
def pin() -> None:
    """Name a step of a run and protect it from deletion.

    Afterward, run@NAME is the path of the step, and no rule of a Checkpointer deletes it.

    \b
    jaxckpt pin run1@40 --name paper
    """


@_command("writing", location("path"))
def unpin() -> None:
    """Remove the name of a pinned step.

    PATH is the run and the name. If the step has no other name, the rules of a Checkpointer may then delete it.

    \b
    jaxckpt unpin run1@paper
    """


@_command("writing", location("run"), location("new_run"))
def fork() -> None:
    """Start a new run from a step of another run.

    The files are hard-linked, so no data is copied.

    \b
    jaxckpt fork run1 run2
    jaxckpt fork run1@40 run2
    """


@_command("writing", location("path"), click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation."))
def rm() -> None:
    """Delete a jaxckpt checkpoint, such as a step of a run.

    The manifest is deleted first, so readers see either the whole checkpoint or none. Other files in the folder are
    kept.
    """
