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
import unicodedata
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str

    min_width: int | None = None
    """The least width to which its texts may be shortened; None if they may not be shortened."""

    middle: bool = False
    """Whether texts are shortened in the middle, such as paths, whose ends matter most."""

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
    widths = [max(map(_display_width, column)) for column in zip(titles, *cells, strict=True)]
    most = terminal_width()
    while most is not None and sum(widths) + 2 * (len(widths) - 1) > most:
        able = [n for n, column in enumerate(columns) if column.min_width is not None and widths[n] > column.min_width]
        if not able:
            break
        widths[max(able, key=lambda n: widths[n])] -= 1
    color = False if os.environ.get("NO_COLOR") else None  # None: only on a terminal
    for number, row in enumerate([titles, *cells]):
        texts: list[str] = []
        for cell, column, width in zip(row, columns, widths, strict=True):
            text = elided_middle(cell, width) if column.middle else elided(cell, width)
            padding = " " * (width - _display_width(text))
            texts.append(padding + text if column.right else text + padding)
        line = "  ".join(texts).rstrip()
        click.echo(line if number else click.style(line, bold=True), color=color)


def terminal_width() -> int | None:
    """Columns of the terminal, or COLUMNS; None if lines may have any length, for example in a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _display_width(text: str) -> int:
    """Width of a text on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def elided(text: str, width: int | None) -> str:
    if width is None or _display_width(text) <= width:
        return text
    while text and _display_width(text) > width - 1:
        text = text[:-1]
    return f"{text}…"


def elided_middle(text: str, width: int | None) -> str:
    """The two ends of a text, with more of the second, and its indentation."""
    if width is None or _display_width(text) <= width:
        return text
    body = text.lstrip()
    room = width - (len(text) - len(body))
    if room < 4:
        return elided(text, width)
    head, tail = body[: len(body) // 2], body[len(body) // 2 :]
    while _display_width(head) + _display_width(tail) > room - 1:
        if 2 * _display_width(head) > _display_width(tail):
            head = head[:-1]
        else:
            tail = tail[1:]
    return f"{text[: len(text) - len(body)]}{head}…{tail}"


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
    """Metrics in one line: `loss=0.01, accuracy=0.6`; "-" for values that were not finite."""
    return ", ".join(f"{name}={'-' if value is None else format(value, '.4g')}" for name, value in metrics.items())


def show_array(dtype: str, shape: Sequence[int]) -> str:
    """Dtype and shape of an array: `float32[8, 4]`."""
    return f"{dtype}{list(shape)}" if shape else dtype


def pick_attributes(value: Any, names: str) -> dict[str, Any]:
    """Some attributes of an object, by name. `names` has them separated by spaces."""
    return {name: getattr(value, name) for name in names.split()}


def print_json(value: Any) -> None:
    click.echo(json.dumps(_to_jsonable(value), indent=2, allow_nan=False))


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
            return _to_jsonable(value.astype(npy_dtype(value.dtype)).tolist())
        case _:
            return value


def npy_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype itself, or, if NumPy does not have it, a dtype that holds all its values."""
    if dtype.isbuiltin == 1:
        return dtype
    import numpy as np

    return np.dtype(f"{dtype.name.rstrip('0123456789')}8" if "int" in dtype.name else "float32")


@contextlib.contextmanager
def replacing_file(path: str) -> Generator[IO[bytes]]:
    """A file to write. It replaces an existing file only when it is complete."""
    path = os.path.realpath(path)
    special = os.path.exists(path) and not os.path.isfile(path)  # /dev/stdout, for example
    draft = path if special else f"{path}.{os.getpid()}.tmp"
    try:
        with open(draft, "wb") as file:
            yield file
        if not special:
            os.replace(draft, path)
    except OSError as error:
        if error.filename == draft:  # the user knows only the name of the file
            error.filename = path
        raise
    finally:
        if not special:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
