"""What a person or a program reads on stdout: tables that fit the terminal, texts that cannot drive it, JSON.

And in which few characters it says what several commands show: an age, metrics, a dtype and shape.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str

    right: bool = False
    """Whether it is of numbers, at the right."""

    least: int | None = None
    """The width down to which its texts may be elided; None where they may not."""

    middle: bool = False
    """Whether the middle is left out, as of paths, whose ends tell most."""


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """A table as wide as the terminal at most; columns that may be elided give way, the widest first."""
    cells = [[printable(cell) for cell in row] for row in rows]
    titles = [printable(column.title) for column in columns]
    widths = [max(map(_cells, column)) for column in zip(titles, *cells, strict=True)]
    most = terminal_width()
    while most is not None and sum(widths) + 2 * (len(widths) - 1) > most:
        able = [n for n, column in enumerate(columns) if column.least is not None and widths[n] > column.least]
        if not able:
            break
        widths[max(able, key=lambda n: widths[n])] -= 1
    for number, row in enumerate([titles, *cells]):
        texts: list[str] = []
        for cell, column, width in zip(row, columns, widths, strict=True):
            text = elided_middle(cell, width) if column.middle else elided(cell, width)
            padding = " " * (width - _cells(text))
            texts.append(padding + text if column.right else text + padding)
        line = "  ".join(texts).rstrip()
        click.echo(line if number else click.style(line, bold=True), color=_color())


def terminal_width() -> int | None:
    """Columns of the terminal, or as COLUMNS says; None where lines may be as long as they are, as in a pipe."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told):
        return int(told)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _color() -> bool | None:
    return False if os.environ.get("NO_COLOR") else None  # None: where it is a terminal


def _cells(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def elided(text: str, width: int | None) -> str:
    if width is None or _cells(text) <= width:
        return text
    while text and _cells(text) > width - 1:
        text = text[:-1]
    return f"{text}…"


def elided_middle(text: str, width: int | None) -> str:
    """Its ends, of which the second tells more; what it is indented by stays."""
    if width is None or _cells(text) <= width:
        return text
    body = text.lstrip()
    room = width - (len(text) - len(body))
    if room < 4:
        return elided(text, width)
    head, tail = body[: len(body) // 2], body[len(body) // 2 :]
    while _cells(head) + _cells(tail) > room - 1:
        if 2 * _cells(head) > _cells(tail):
            head = head[:-1]
        else:
            tail = tail[1:]
    return f"{text[: len(text) - len(body)]}{head}…{tail}"


def printable(text: str, keep: str = "") -> str:
    """A text for a terminal: names in a checkpoint are anybody's, and could hold what moves a cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in names by their value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def show_age(created: str | None) -> str:
    """How long ago: "5 min"; "-" where it is not known."""
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
    """`loss=0.01, accuracy=0.6`."""
    return ", ".join(f"{name}={'-' if value is None else format(value, '.4g')}" for name, value in metrics.items())


def show_array(dtype: str, shape: Sequence[int]) -> str:
    """`float32[8, 4]`."""
    return f"{dtype}{list(shape)}" if shape else dtype


def print_json(value: Any) -> None:
    click.echo(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """A value as JSON holds it: complex numbers as [real, imaginary], bytes as base64, what is not finite as a text
    that Python's float() takes."""
    if isinstance(value, np.ndarray):
        return _plain(value.astype(plain_dtype(value.dtype)).tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


def plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype itself, or where NumPy alone does not know it one that holds all its values."""
    if dtype.isbuiltin == 1:
        return dtype
    return np.dtype(f"{dtype.name.rstrip('0123456789')}8" if "int" in dtype.name else "float32")
