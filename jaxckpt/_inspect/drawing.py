"""Drawings of layouts and sizes as inline SVG without scripts or styles, for notebooks and for reports.

Names of leaves, axes and processes can be any text. `element` escapes everything that is not `Markup`.
"""

from __future__ import annotations

import collections
import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from jaxckpt._inspect.short_names import shorten_names
from jaxckpt._model.grid import Spec, pieces_along, show_axes, show_spec
from jaxckpt._model.records import MeshRecord
from jaxckpt._pipeline.progress import show_bytes

T = TypeVar("T")

COLOURS: tuple[str, ...] = ("#77aadd", "#ee8866", "#44bb99", "#eedd88", "#99ddff", "#ffaabb", "#bbcc33", "#aaaa00")
"""Paul Tol's "light" scheme (Colour Schemes, SRON/EPS/TN/09-002, 2021). Color-blind people can distinguish the
colors, and black text on them is legible. A page may restyle them by the classes k0 to k7."""

MEANINGS = {
    "bytes": "Array data; replicas and leaves that share an array are stored once",
    "leaves": "Values of the saved tree: arrays and Python values",
    "arrays": "Leaves with array data",
    "objects": "Stored files that hold array data",
    "dtypes": "The dtypes with the most bytes first",
    "saved from": "The mesh at the time of the save",
    "needed": "Bytes that the processes need; a box is counted once per process",
    "read": "Bytes of the chunks and indexes that would be read",
    "over-read": "Bytes that are read but not needed, because chunks are read whole",
    "read / needed": "Above 1: chunks are read whole. Below 1: processes read for each other",
    "received from other processes": "Bytes that one process reads and sends to the others",
    "requests": "Storage reads, before neighboring reads are merged",
    "per device": "Bytes of arrays on each device, from the smallest to the largest",
    "additional host memory": "Peak host memory of a process in addition to the arrays",
    "plan": "Describing the tree and planning the writes",
    "device to host": "Copying arrays from the devices to host memory",
    "write": "Writing objects, including fsync of the files",
    "sync": "fsync of folders",
    "barrier": "Waiting for the other processes",
    "save id": "Unique id of this save",
    "kind": "What was saved: jax (a jax.Array), key (PRNG keys), numpy, or a Python type",
    "stored": "The Zarr array, its objects (files) and its chunks (the unit of reading)",
    "std": "Standard deviation of the finite values",
}
"""The meaning of each label, shown as a tooltip."""

_GREY = "#cccccc"
_INK = "#111111"
_FONT = "ui-sans-serif, system-ui, sans-serif"


_NOTEBOOK = """
.jaxckpt .figures { display: flex; flex-wrap: wrap; gap: 4px 28px; margin: 4px 0 10px; }
.jaxckpt dt { font-size: 12px; font-weight: 400; opacity: 0.7; }
.jaxckpt dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.jaxckpt th, .jaxckpt td { padding: 1px 20px 1px 0; text-align: right; }
.jaxckpt .words { text-align: left; }
"""


class Markup(str):
    """Text that is already HTML or SVG."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | float) -> Markup:
    """An element of HTML or SVG. Children and attributes are escaped, except `Markup`.

    Attributes are written with `_` for `-`; `class_` is class.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"' for name, value in attributes.items()
    )
    inside = "".join(child if isinstance(child, Markup) else html.escape(child) for child in children)
    return Markup(f"<{tag}{written}>{inside}</{tag}>")


def joined(pieces: Iterable[Markup]) -> Markup:
    return Markup("".join(pieces))


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _svg(width: str, height: float, label: str, *children: Markup) -> Markup:
    return element(
        "svg",
        *children,
        role="img",
        aria_label=label,
        width=width,
        height=_number(height),
        font_family=_FONT,
        font_size=11,
        fill="currentColor",
    )


def _filled(colour: int | None) -> dict[str, str]:
    """The attributes of a shape with this color; gray without a color."""
    if colour is None:
        return {"class_": "kx", "fill": _GREY}
    return {"class_": f"k{colour % len(COLOURS)}", "fill": COLOURS[colour % len(COLOURS)]}


def _text(x: float | str, y: float, text: str, **more: str | float) -> Markup:
    return element("text", text, x=x if isinstance(x, str) else _number(x), y=_number(y), **more)


def term(name: str) -> Markup:
    """The name of a figure, with an explanation as a tooltip."""
    return element("dt", name, **({"title": MEANINGS[name]} if name in MEANINGS else {}))


def definitions(figures: Mapping[str, str], *, explain: bool = True) -> Markup:
    """Figures with their names, and explanations for known names."""
    pairs = [
        element("div", term(name) if explain else element("dt", name), element("dd", figure))
        for name, figure in figures.items()
    ]
    return element("dl", *pairs, class_="figures")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> Markup:
    """A table whose first columns hold words and the others figures."""
    classes = [{"class_": "words"} if column < text_columns else {} for column in range(len(heads))]
    lines = [
        element("tr", *(element("th", head, scope="col", **more) for head, more in zip(heads, classes, strict=True)))
    ]
    lines += [
        element("tr", *(element("td", cell, **more) for cell, more in zip(row, classes, strict=True))) for row in rows
    ]
    return element("div", element("table", *lines), class_="wide")


def notebook(*drawings: Markup) -> Markup:
    """Drawings for a notebook."""
    return element("div", element("style", Markup(_NOTEBOOK)), *drawings, class_="jaxckpt")


def clipped(text: str, most: int) -> str:
    """A text, shortened to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


# Layouts --------------------------------------------------------------------------------------------------


LAYOUT_WIDTH = 320
_MAX_CELLS = 8  # along a side; if there are more, the first five and the last two are drawn


def layout_drawing(mesh: MeshRecord | None, spec: Spec, rank: int, where: str, width: int = LAYOUT_WIDTH) -> Markup:
    """The boxes that a layout cuts a leaf of `rank` dimensions into, each with the devices that hold it.

    If three or more dimensions are split, all except the last run down the side. `where` describes a leaf without a
    mesh. The attribute `data-box` of a box has its index along each dimension, for pages that know the leaf's shape.
    """
    axes = mesh.axes if mesh is not None else {}
    pieces = pieces_along(axes, spec, rank)
    split_dims = [dim for dim, count in enumerate(pieces) if count > 1]
    column_dims = split_dims[-1:] if len(split_dims) > 1 or split_dims == [rank - 1] else []
    row_dims = [dim for dim in split_dims if dim not in column_dims]
    columns, rows = (math.prod(pieces[dim] for dim in dims) for dims in (column_dims, row_dims))
    left, top = (16 if row_dims else 0), (16 if column_dims else 0)
    x_at, x_gap = _cell_positions(columns, width - left)
    height = 34 if rows <= 4 else 30
    y_at, y_gap = _cell_positions(rows, min(rows, _MAX_CELLS) * height if rows > 1 else 56)
    # Axes of size 1 split nothing, and NumPy takes at most 32 or 64 axes.
    sizes = {name: size for name, size in axes.items() if size > 1}
    devices = np.zeros(0, np.int64) if mesh is None else np.array(mesh.devices).reshape(tuple(sizes.values()))
    drawn: list[Markup] = []
    for row, (y, tall) in y_at.items():
        for column, (x, wide) in x_at.items():
            box = _unravelled(row, {dim: pieces[dim] for dim in row_dims})
            box |= _unravelled(column, {dim: pieces[dim] for dim in column_dims})
            position: dict[str, int] = {}
            for dim, piece in box.items():
                position |= _unravelled(piece, {name: sizes[name] for name in spec[dim] if name in sizes})
            holders = devices[tuple(position.get(name, slice(None)) for name in sizes)].reshape(-1).tolist()
            number = row * columns + column
            # Neighbors have different colors for any number of columns.
            colour = None if mesh is None else number if rows * columns <= len(COLOURS) else 3 * row + column
            index = [box.get(dim, 0) for dim in range(rank)]
            drawn.append(_box((left + x, top + y, wide, tall), colour, holders, where, index))
    if x_gap:
        drawn.append(_text(left + x_gap, top + y_at[0][0] + y_at[0][1] / 2 + 4, "⋯", text_anchor="middle"))
    if y_gap:
        drawn.append(_text(left + x_at[0][0] + x_at[0][1] / 2, top + y_gap + 4, "⋮", text_anchor="middle"))
    if column_dims:
        drawn.append(_text(left, 11, _describe_split(column_dims, pieces, spec, width // 7), class_="dim"))
    last = max(y + tall for y, tall in y_at.values())
    if row_dims:
        text = _describe_split(row_dims, pieces, spec, max(6, int(last / 6)))
        drawn.append(_text(-(top + last), 11, text, transform="rotate(-90)", class_="dim"))
    said = f"{show_spec(spec)} on {show_axes(axes)}" if mesh is not None else where
    return _svg(str(width), top + last, clipped(f"layout: {said}", 200), *drawn)


def _cell_positions(count: int, room: float) -> tuple[dict[int, tuple[float, float]], float | None]:
    """(start, length) of each cell that is drawn along a side, and the middle of the gap if some are left out."""
    if count <= _MAX_CELLS:
        each = room / max(1, count)
        return {cell: (cell * each + 1, each - 2) for cell in range(count)}, None
    gap = 16.0
    each = (room - gap) / 7
    starts = {cell: cell * each for cell in range(5)} | {count - 2: 5 * each + gap, count - 1: 6 * each + gap}
    return {cell: (start + 1, each - 2) for cell, start in starts.items()}, 5 * each + gap / 2


def _describe_split(dims: Sequence[int], pieces: Sequence[int], spec: Spec, most: int) -> str:
    text = ", ".join(
        f"dim {dim} by {'·'.join(clipped(axis, 20) for axis in spec[dim])} ({pieces[dim]})" for dim in dims
    )
    return clipped(text, most)


def _unravelled(number: int, sizes: Mapping[T, int]) -> dict[T, int]:
    """The index of an element along each axis, from its number in row-major order."""
    return dict(zip(sizes, map(int, np.unravel_index(number, tuple(sizes.values()))), strict=True))


def _box(
    area: tuple[float, float, float, float],
    colour: int | None,
    devices: Sequence[int],
    where: str,
    index: Sequence[int],
) -> Markup:
    """One box in an area, (x, y, width, height), with as many of its devices written into it as fit."""
    x, y, wide, tall = area
    ids = show_ids(devices)
    lines = [ids if devices else where]
    if len(devices) > 1:
        copies = f"×{len(devices)}"
        room = int((wide - 4) / 6.2)
        lines = [ids if len(ids) <= room else f"{devices[0]}…", copies]
        if len(ids) + len(copies) + 1 <= room and tall < 40:
            lines = [f"{ids} {copies}"]
    middle = y + tall / 2 + 4 - 6.5 * (len(lines) - 1)
    texts = [
        _text(x + wide / 2, middle + 13 * number, line, fill=_INK, text_anchor="middle", class_="ink")
        for number, line in enumerate(lines)
    ]
    many = f"{len(devices)} replicas on devices" if len(devices) > 1 else "device"
    title = f"{many} {show_ids(devices, most=64)}" if devices else where
    corner = {"x": _number(x), "y": _number(y), "width": _number(max(0.0, wide)), "height": _number(max(0.0, tall))}
    return element(
        "g",
        element("rect", element("title", title), **corner, rx=2, **_filled(colour)),
        *texts,
        class_="box",
        pointer_events="all",
        data_box=" ".join(map(str, index)),
        data_devices=title,
    )


def show_ids(ids: Sequence[int], most: int = 4) -> str:
    """Numbers of devices or processes in a few characters: "0–3", "0, 4", "0, 8, …, 56"."""
    if len(ids) > 2 and all(after - before == 1 for before, after in itertools.pairwise(ids)):
        return f"{ids[0]}–{ids[-1]}"
    if len(ids) <= most:
        return ", ".join(map(str, ids))
    shown = ids[: max(2, most - 2)]
    return f"{', '.join(map(str, shown))}, …, {ids[-1]}"


def show_cuts(shape: Sequence[int], spec: Spec, axes: Mapping[str, int]) -> list[str]:
    """How each dimension is split: "dim 0: 4096 = 2 × 2048 by data", "dim 1: 64, whole"."""
    return [
        f"dim {dim}: {length}"
        + (f" = {count} × {length // count} by {', '.join(spec[dim])}" if count > 1 else ", whole")
        for dim, (length, count) in enumerate(zip(shape, pieces_along(axes, spec, len(shape)), strict=True))
    ]


# Bars -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """A line of a bar chart."""

    label: str
    figure: str
    sections: tuple[tuple[int | None, float, str], ...]
    """(color, fraction of the whole width, label) from left to right."""


def bars(label: str, lines: Sequence[Bar], legend: Sequence[str] = ()) -> Markup:
    """Horizontal bars over the full width, with text of one size on every screen."""
    drawn: list[Markup] = []
    for colour, name in enumerate(legend):  # three per line
        x, y = f"{colour % 3 / 3:.3%}", 18.0 * (colour // 3)
        drawn.append(element("rect", x=x, y=_number(y + 1), width=11, height=11, rx=2, **_filled(colour)))
        meaning = [element("title", MEANINGS[name])] if name in MEANINGS else []
        drawn.append(element("svg", *meaning, _text(17, y + 11, name), x=x, overflow="visible"))
    top = 18.0 * -(-len(legend) // 3) + (6 if legend else 0)
    for number, bar in enumerate(lines):
        y = top + 36 * number
        drawn.append(_text(0, y + 12, bar.label))
        drawn.append(_text("100%", y + 12, bar.figure, text_anchor="end"))
        at = 0.0
        for colour, fraction, title in bar.sections:
            area = {"x": f"{at:.3%}", "y": _number(y + 17), "width": f"{fraction:.3%}", "height": 12}
            drawn.append(element("rect", element("title", title), **area, **_filled(colour)))
            at += fraction
    return _svg("100%", top + 36 * len(lines), label, *drawn)


def byte_bars(sizes: Mapping[str, int], most: int = 12) -> Markup:
    """A bar for the bytes of each subtree, largest first; `sizes` are of leaves, by path.

    Of the containers whose children fit into `most` bars, the largest is opened, repeatedly.
    """
    totals = collections.Counter[str]()
    children: dict[str | None, dict[str, None]] = {None: {}}
    for path, size in sizes.items():
        above: str | None = None
        for key in path.split("/"):
            subtree = key if above is None else f"{above}/{key}"
            children.setdefault(above, {})[subtree] = None
            totals[subtree] += size
            above = subtree
    shown = set(children[None])
    while fitting := [path for path in shown if path in children and len(shown) + len(children[path]) <= most + 1]:
        opened = max(fitting, key=lambda path: (totals[path], path))
        shown = shown - {opened} | set(children[opened])
    total = max(1, sum(sizes.values()))
    ranked = sorted(((path, totals[path]) for path in shown if totals[path]), key=lambda item: (-item[1], item[0]))
    if len(ranked) > most:
        ranked[most - 1 :] = [(f"… {len(ranked) - most + 1} more", sum(size for _, size in ranked[most - 1 :]))]
    largest = max((size for _, size in ranked), default=1)
    names = shorten_names([path for path, _ in ranked], 60)
    lines = [
        Bar(name, f"{show_bytes(size)}, {size / total:.1%}", ((0, size / largest, f"{path}: {size:,} B"),))
        for name, (path, size) in zip(names, ranked, strict=True)
    ]
    return bars("Bytes by subtree", lines)
