"""Resolves arguments of a command against a checkpoint: leaves, indices, specs, files to write."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import signal
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import click

from jaxckpt._cli.arguments import SpecRule
from jaxckpt._cli.terminal import is_special, printable
from jaxckpt._inspect.open import Checkpoint, LazyLeaf
from jaxckpt._model.paths import containers_of
from jaxckpt._model.select import parse_select, unmatched_hint
from jaxckpt._model.tree import Tree, nested_dicts
from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._pipeline.progress import LINE_SECONDS, Progress, draws_bars
from jaxckpt._rules.rule_set import Rules
from jaxckpt._store.store_path import local_path
from jaxckpt.errors import InputError, show_path

if TYPE_CHECKING:
    from concurrent.futures import Executor


def progress_options(progress: bool) -> Options:
    """Options that draw a progress bar if stderr is a terminal. Otherwise a long command prints a line every
    `LINE_SECONDS`; the time counts from the start of the command, which may read several checkpoints. With
    `progress=False`, a command shows neither."""
    if not progress:
        return Options()
    next_line = time.monotonic() + LINE_SECONDS

    def print_line(progress: Progress) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + LINE_SECONDS
            click.echo(printable(f"jaxckpt: {progress}"), err=True)

    return Options(progress=draws_bars() or print_line)


@contextlib.contextmanager
def worker_processes(workers: int | None) -> Generator[Executor | None]:
    """The executor for `--workers`. Its processes end with the block, after an error without the work that is left."""
    if workers is None:
        yield None
        return
    # Imported here, because most commands do without. A forked process would have the locks of this one's threads.
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    executor = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_ignore_interrupts)
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal. The command ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def rules_of(path: str, rules: str | None, back_to: str | None) -> Rules | None:
    """The rules for `--rules` and `--back-to`. Raises click.UsageError, InputError, DataError."""
    if rules is None:
        if back_to is not None:
            raise click.UsageError("--back-to needs --rules, which names the tree to map back from")
        return None
    from jaxckpt._formats.huggingface import huggingface_dtype, huggingface_rules

    folder = local_path(path if back_to is None else back_to)
    if folder is None:
        raise InputError(f"--rules needs the config.json of a local folder, but {path} is not one")
    mapping = huggingface_rules(folder, layout="maxtext" if rules == "maxtext" else "plain", scan=rules != "plain")
    return mapping if back_to is None else mapping.inverse(huggingface_dtype(folder))


def selected(checkpoint: Checkpoint, select: Sequence[str]) -> dict[str, LazyLeaf]:
    """The leaves that any of the globs selects, or all leaves. Raises InputError if a glob selects none."""
    leaves = checkpoint.leaves
    chosen = parse_select(select).choose(leaves) if select else [True] * len(leaves)
    return dict(itertools.compress(leaves.items(), chosen))


def resolve_leaf(checkpoint: Checkpoint, text: str) -> tuple[LazyLeaf, Any]:
    """(leaf, index or None) of `LEAF` or `LEAF[index]`; a leaf's own name may have brackets. Raises InputError."""
    name, bracket, rest = text.partition("[")
    if text not in checkpoint and name in checkpoint and bracket and "]" not in rest:
        closed = f"{text}]" if rest.strip() else f"{name}[0]"
        raise InputError(f"index [{rest} of leaf {show_path(name)}: the bracket is not closed, expected {closed}")
    match = None if text in checkpoint else re.fullmatch(r"(.*?)\[([^\[\]]*)\]", text, re.DOTALL)
    index = _index(match[2]) if match else None
    try:
        return checkpoint[match[1] if match else text], index
    except KeyError as error:
        raise InputError(str(error.args[0])) from None


def _index(text: str) -> tuple[Any, ...]:
    try:
        return tuple(_index_entry(entry.strip()) for entry in text.rstrip().removesuffix(",").split(","))
    except (ValueError, TypeError):  # a slice of four entries is a TypeError
        raise InputError(f"index [{text}]: expected integers, slices and ..., such as [8:16, 0]") from None


def _index_entry(text: str) -> Any:
    if text == "...":
        return ...
    if ":" not in text:
        return int(text)
    return slice(*(int(bound) if bound.strip() else None for bound in text.split(":")))


def require_writable(output: str, suffix: str, path: str, *, overwrite: bool) -> None:
    """Raise InputError if a command must not write this file: it belongs to the checkpoint at a path, does not end in
    the suffix of what is written, or exists without `--overwrite`."""
    folder = local_path(path)
    if folder is not None:
        resolve = functools.partial(os.path.realpath, folder)
        folder = run_watched(f"looking at {path}", Options().timeout_seconds, resolve)
        written = os.path.realpath(output)
        if written == folder or written.startswith(os.path.join(folder, "")):
            raise InputError(f"{output} is in the checkpoint {path}: give a file outside of it")
    if is_special(output):  # such as /dev/stdout
        return
    if os.path.splitext(output)[1] != suffix:
        raise InputError(f"{output} does not end in {suffix}, the only format that this command writes")
    if os.path.exists(output) and not overwrite:
        raise InputError(f"{output} already exists: --overwrite replaces it")


def spec_tree(checkpoint: Checkpoint, rules: Sequence[SpecRule], select: Sequence[str] = ()) -> Tree:
    """The specs for the selected leaves, as nested dicts; None without `--specs`."""
    if not rules:
        return None
    from jax.sharding import PartitionSpec

    # Leaves that were saved from the host stay there.
    paths = [path for path, leaf in selected(checkpoint, select).items() if leaf.kind in ("jax", "key")]
    specs: dict[str, Any] = {}
    for glob, entries in rules:
        matched = paths if glob is None else list(filter(parse_select(glob), paths))
        if not matched:
            hint = unmatched_hint(glob or "", {*paths, *containers_of(paths)})
            raise InputError(f"--specs {glob or PartitionSpec(*entries)}: matches no array{hint}")
        for path in matched:
            specs.setdefault(path, PartitionSpec(*entries))
    return nested_dicts(specs)
