"""The output of commands: tables that fit the terminal, text without control characters, JSON, atomic files."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import click

from jaxckpt._inspect.short_names import display_width, shorten_end, shorten_names
from jaxckpt.errors import JaxckptError


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str

    min_width: int | None = None
    """The least width to which its texts may be shortened; None if they may not be shortened."""

    is_name: bool = False
    """Whether texts are names, which are shortened in the middle and stay different."""

    right: bool = False
    """Whether its texts are right-aligned."""


def number_column(title: str) -> Column:
    return Column(title, right=True)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table that fits the terminal. Of the columns that may be shortened, the widest is shortened first.

    Rich's tables shorten texts only at the end, pad the last column, and wrap lines even in a pipe.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    titles = [printable(column.title) for column in columns]
    widths = [max(map(display_width, column)) for column in zip(titles, *cells, strict=True)]
    most = terminal_width()
    while most is not None and sum(widths) + 2 * (len(widths) - 1) > most:
        able = [n for n, column in enumerate(columns) if column.min_width is not None and widths[n] > column.min_width]
        if not able:
            break
        widths[max(able, key=lambda n: widths[n])] -= 1
    color = False if os.environ.get("NO_COLOR") else None  # None: only on a terminal
    lines = zip(*map(_cells, columns, zip(titles, *cells, strict=True), widths), strict=True)
    for number, texts in enumerate(lines):
        line = "  ".join(texts).rstrip()
        click.echo(line if number else click.style(line, bold=True), color=color)


def _cells(column: Column, texts: Sequence[str], width: int) -> Iterator[str]:
    """The title and the texts of a column, shortened or padded to its width."""
    short = _shorten_indented(texts, width) if column.is_name else [shorten_end(text, width) for text in texts]
    for text in short:
        padding = " " * (width - display_width(text))
        yield padding + text if column.right else text + padding


def terminal_width() -> int | None:
    """Columns of the terminal, or COLUMNS; None if lines may have any length, for example in a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _shorten_indented(names: Sequence[str], width: int) -> list[str]:
    """Names shortened in the middle. Their indentation stays, except that it takes at most half of the width."""
    if all(display_width(name) <= width for name in names):
        return list(names)
    indents = [min(len(name) - len(name.lstrip(" ")), width // 2) for name in names]
    short = {
        indent: iter(
            shorten_names([n.lstrip(" ") for n, at in zip(names, indents, strict=True) if at == indent], width - indent)
        )
        for indent in set(indents)
    }
    return [" " * indent + next(short[indent]) for indent in indents]


def printable(text: str, keep: str = "") -> str:
    """A text without control characters, because a checkpoint from a stranger may have them in names."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def natural_key(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in names by their value."""
    # The digits of a number are compared as text, because int() refuses more than 4,300 of them.
    digits = ((run.isdecimal(), run, run.lstrip("0")) for run in re.split(r"(\d+)", name))
    return [(len(value), value) if is_number else (-1, run) for is_number, run, value in digits]


def show_age(created: str | None) -> str:
    """The age: "5 min"; "-" if unknown."""
    try:
        then = datetime.datetime.fromisoformat(created or "")
        seconds = (datetime.datetime.now(datetime.UTC) - then).total_seconds()
    except (ValueError, TypeError):
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def show_metrics(metrics: Mapping[str, float | None]) -> str:
    """Metrics in one line: `loss=0.01, accuracy=0.6`; "-" for NaN."""
    return ", ".join(f"{name}={'-' if value is None else format(value, '.4g')}" for name, value in metrics.items())


def show_leaf(path: str) -> str:
    """The path of a leaf for people; that of a tree which is a single leaf is empty."""
    return path or "(the tree itself)"


def show_array(dtype: str, shape: Sequence[int]) -> str:
    """Dtype and shape of an array: `float32[8, 4]`."""
    return f"{dtype}{list(shape)}" if shape else dtype


def pick_attributes(value: Any, names: str) -> dict[str, Any]:
    """Some attributes of an object, by name. `names` has them separated by spaces."""
    return {name: getattr(value, name) for name in names.split()}


def print_json(value: Any, *, to_stderr: bool = False) -> None:
    click.echo(json.dumps(_to_jsonable(value), indent=2, allow_nan=False), err=to_stderr)


def print_done(text: str, record: Mapping[str, Any], as_json: bool, *, written: str | None = None) -> None:
    """Print what a command did. If it wrote a file that is not a regular one, such as /dev/stdout, print to stderr."""
    to_stderr = written is not None and is_special(written)
    if as_json:
        print_json(record, to_stderr=to_stderr)
    else:
        click.echo(printable(text, keep="\n"), err=to_stderr)


def _to_jsonable(value: Any) -> Any:
    """A value for JSON: complex numbers as [real, imaginary], bytes as base64, non-finite numbers as texts that
    Python's float() accepts."""
    match value:
        case Mapping():
            return {name: _to_jsonable(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list() | tuple():
            return [_to_jsonable(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case complex():
            return [_to_jsonable(value.real), _to_jsonable(value.imag)]
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case _ if hasattr(value, "dtype"):  # a NumPy array or scalar
            from jaxckpt._model.dtypes import npy_dtype  # imports NumPy

            return _to_jsonable(value.astype(npy_dtype(value.dtype)).tolist())
        case _:
            return value


def is_special(path: str) -> bool:
    """Whether a path is not a regular file, but a pipe at /dev/stdout, for example, which cannot be replaced."""
    return os.path.exists(path) and not os.path.isfile(path)


@contextlib.contextmanager
def replacing_file(path: str) -> Generator[IO[bytes]]:
    """A file to write. It replaces an existing file only when it is complete."""
    special = is_special(path)
    path = path if special else os.path.realpath(path)
    draft = path if special else f"{path}.{os.getpid()}.tmp"
    try:
        with open(draft, "wb") as file:
            yield file
        if not special:
            os.replace(draft, path)
    except OSError as error:
        # The user knows only the name of the file. An error of a write names none.
        if error.filename == draft or (error.filename is None and not isinstance(error, JaxckptError)):
            error.filename = path
        raise
    finally:
        if not special:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
