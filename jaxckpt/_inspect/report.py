"""A checkpoint as one HTML page: its bytes, layouts and values, the timing of its save, and the cost of a restore.

manifest ─▶ leaves, with one form for similar leaves ─▶ JSON in the page ─▶ treemap, table, details: report.html
         ─▶ drawings and tables without a script ─▶ HTML

Names and metadata of a checkpoint are text. `drawing.element` escapes them, or they are part of the JSON, from which
the page's script creates only text nodes. In addition, the page's content security policy forbids all other scripts.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import html
import importlib.resources
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxckpt._arguments.specs import Specs
from jaxckpt._inspect.drawing import (
    LAYOUT_WIDTH,
    MEANINGS,
    Bar,
    Markup,
    bars,
    clipped,
    definitions,
    element,
    joined,
    layout_drawing,
    show_cuts,
    show_ids,
    table,
    term,
)
from jaxckpt._inspect.open import Checkpoint
from jaxckpt._inspect.restore_plan import LeafLayout, RestorePlan, draw_plan, saved_layout
from jaxckpt._inspect.short_names import shorten_names
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import pieces_along, show_axes
from jaxckpt._model.records import LeafRecord, Manifest
from jaxckpt._options import Options, options_or_default, require_bool
from jaxckpt._pipeline.progress import display_progress, show_bytes
from jaxckpt._restore.read_loop import StoredArray
from jaxckpt._sources.open_source import Location, source_at
from jaxckpt._sources.source import Source
from jaxckpt.errors import show_count

MAX_DRAWINGS = 400
"""The most layouts that are drawn; models have about a dozen. The others are described in words."""

MAX_BARS = 64
"""The most processes with a separate bar."""

_MAX_METRICS = 12  # at the top of the page
_MAX_METADATA_CHARS = 20_000  # characters of the user's metadata that are shown
_BINS = 64  # of a histogram; counting uses more bins, which are merged at the end
_FINE_BINS = 1024
_SCALE = 1 / 16  # keeps the range of the bins from overflowing
_BLOCK = 1 << 19  # values per call


@explain_keywords
def report(
    path: Location,
    *,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    specs: Specs = None,
    histograms: bool = False,
    options: Options | None = None,
) -> str:
    """Show a checkpoint as one self-contained HTML document.

    The page has a treemap of bytes by subtree, a table of leaves to search and sort, the layout of each leaf on its
    mesh, and the seconds that each process spent in each phase of the save. Any single process may call this.

    Args:
        path: A path or URL that `save` wrote, or another checkpoint that `restore` accepts.
        mesh: Also show what a restore onto this mesh would read. As in `Checkpoint.plan`, this machine need not have
            the mesh: {"data": 64, "model": 8}.
        specs: With `mesh`, as for `restore`.
        histograms: Also read every floating-point leaf, in memory bounded by `options.host_bytes`, and show the
            distribution of its values. By default only the manifest is read.
        options: See `Options`.

    Returns:
        The document as text. Write it to a file as UTF-8 and open the file in a browser.

    Raises:
        NotACheckpointError, ManifestError, StorageError: As `open`.
        MismatchError, SpecError, LayoutError: As `restore` onto `mesh` would.
        DataError, StorageError: A leaf cannot be read; with `histograms` only.
        InputError: Another argument is invalid.

    Examples:
        >>> import jaxckpt, numpy as np
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/report", {"w": np.ones((8, 4))}, overwrite=True)
        >>> page = jaxckpt.report("/tmp/jaxckpt-doc/report", mesh={"data": 2})
        >>> page.startswith("<!doctype html>")
        True
    """
    options = options_or_default(options)
    source = source_at(path, options)
    checkpoint = Checkpoint(source, options)
    plan = None if mesh is None and specs is None else checkpoint.plan(mesh=mesh, specs=specs)
    drawings = _Drawings(LAYOUT_WIDTH if plan is None else LAYOUT_WIDTH // 2 - 6)  # two are side by side
    data = _data(source.manifest, plan, drawings)

    data["histograms"] = _histograms(source, options) if require_bool(histograms, "histograms") else {}
    data["meanings"] = MEANINGS
    restore = Markup() if plan is None else _section("Restore plan", draw_plan(plan, MAX_BARS))
    sections = [_save_section(source.manifest), restore, _about_section(source.manifest)]
    return _page(
        title=f"{checkpoint.path} · jaxckpt",
        header=_header(checkpoint, source.manifest),
        sections=joined(sections),
        drawings=joined(drawings.templates),
        data=data,
    )


def _page(*, title: str, header: Markup, sections: Markup, drawings: Markup, data: Mapping[str, Any]) -> str:
    page = importlib.resources.files("jaxckpt._inspect").joinpath("report.html").read_text(encoding="utf-8")
    own = [re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("style", "script")]
    style, script = (_digest(match[1]) for match in own if match is not None)
    texts = {
        "policy": f"default-src 'none'; style-src {style}; script-src {script}; base-uri 'none'; form-action 'none'",
        "title": html.escape(title),
        "header": header,
        "sections": sections,
        "drawings": drawings,
        # The text of a script element must not contain its end tag, whatever the element's type.
        "data": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: texts[match[1]], page)
    return page.encode(errors="backslashreplace").decode()  # a path need not be valid UTF-8


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# The leaves -----------------------------------------------------------------------------------------------


class _Drawings:
    """Draws each layout once. Leaves of any shape share the drawing of a spec on a mesh."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._numbers: dict[Any, int] = {}
        self.templates: list[Markup] = []

    def layout(self, where: LeafLayout, shape: Sequence[int]) -> dict[str, Any]:
        """A layout in the form that the page's script expects."""
        axes = {} if where.mesh is None else where.mesh.axes
        return {
            "spec": where.spec,
            "on": where.on,
            "cuts": show_cuts(shape, where.split, axes) if where.mesh is not None else [],
            "pieces": pieces_along(axes, where.split, len(shape)),
            "drawing": self._number(where, len(shape)),
        }

    def _number(self, where: LeafLayout, rank: int) -> int | None:
        key = (id(where.mesh), where.split, where.on, rank)  # ids are unique here: the meshes live as long as this
        if key not in self._numbers:
            if len(self.templates) >= MAX_DRAWINGS:
                return None
            drawn = layout_drawing(where.mesh, where.split, rank, where.on, self._width)
            self._numbers[key] = len(self.templates)
            self.templates.append(element("template", drawn, id=f"drawing-{len(self.templates)}"))
        return self._numbers[key]


def _data(manifest: Manifest, plan: RestorePlan | None, drawings: _Drawings) -> dict[str, Any]:
    """The leaves, and the properties that similar leaves share (their form), as JSON for the page's script."""
    restored_layouts = {} if plan is None else {leaf.path: leaf.wanted for leaf in plan.leaves}
    numbers: dict[Any, int] = {}
    forms: list[dict[str, Any]] = []
    leaves: list[list[Any]] = []
    for leaf in manifest.leaves:
        restored = restored_layouts.get(leaf.path)
        form_key = (
            leaf.kind,
            leaf.stack,
            leaf.layout,
            leaf.impl,
            restored and (id(restored.mesh), restored.split, restored.on),
        )
        if form_key not in numbers:
            numbers[form_key] = len(forms)
            forms.append(_form(manifest, leaf, restored, drawings))
        value = [] if leaf.value is None else [clipped(leaf.value, 200)]
        leaves.append([leaf.path, numbers[form_key], *value])
    return {"leaves": leaves, "forms": forms}


def _form(manifest: Manifest, leaf: LeafRecord, restored: LeafLayout | None, drawings: _Drawings) -> dict[str, Any]:
    """The common properties of similar leaves, in the form that the page's script expects."""
    if leaf.stack is None:
        return {"kind": leaf.kind, "dtype": leaf.kind, "shape": [], "bytes": 0, "stored": ""}
    stack = manifest.stacks[leaf.stack]
    chunk, sides = ("×".join(map(str, lengths)) for lengths in (stack.chunk, stack.object))
    stored = f"{stack.name} ({show_count(stack.rows, 'leaf')}); objects of {sides}, chunks of {chunk}"
    return {
        "kind": leaf.kind if leaf.impl is None else f"{leaf.kind} ({leaf.impl})",
        "dtype": stack.dtype,
        "shape": list(stack.shape),
        "bytes": manifest.leaf_bytes(leaf),
        "stored": f"{stored}, {stack.compression}" if stack.compression else stored,
        "saved": drawings.layout(saved_layout(manifest, leaf), stack.shape),
        "wanted": None if restored is None else drawings.layout(restored, stack.shape),
    }


# Values ---------------------------------------------------------------------------------------------------


def _histograms(source: Source, options: Options) -> dict[int, dict[str, Any]]:
    """The distribution of the values of each leaf of floating-point numbers, by the leaf's number."""
    histograms: dict[int, dict[str, Any]] = {}
    # Half for the data that is read, half for copies in other dtypes.
    options = replace(options, host_bytes=max(1, options.host_bytes // 2))
    sizes = {
        number: source.manifest.leaf_bytes(leaf)
        for number, leaf in enumerate(source.manifest.leaves)
        if leaf.stack is not None and leaf.kind not in ("key", "str", "bytes")
        if jnp.issubdtype(DTYPES[source.manifest.stacks[leaf.stack].dtype], jnp.floating)
    }
    with display_progress("report", sum(sizes.values()), options.progress) as advance:
        for number in sizes:
            values = _ValueStatistics()
            for slab in StoredArray(source, number, options, advance).slabs():
                values.add(slab)
            histograms[number] = values.summary()
    return histograms


class _ValueStatistics:
    """Counts values in one pass. The range of the bins grows with the values."""

    def __init__(self) -> None:
        self._counts = np.zeros(_FINE_BINS, np.int64)
        self._low = self._high = 0.0  # edges, of values times _SCALE
        self._least, self._most = math.inf, -math.inf
        self._finite = self._nan = self._inf = self._zero = 0
        self._mean = self._squared_deviations = 0.0

    def add(self, slab: np.ndarray[Any, Any]) -> None:
        flat = slab.reshape(-1)
        for begin in range(0, flat.size, _BLOCK):
            self._add(flat[begin : begin + _BLOCK].astype(np.float64))

    def _add(self, block: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        values = block[np.isfinite(block)]
        nan = int(np.isnan(block).sum())
        self._nan += nan
        self._inf += block.size - values.size - nan
        self._zero += block.size - int(np.count_nonzero(block))
        if not values.size:
            return
        self._least, self._most = min(self._least, values.min()), max(self._most, values.max())
        with np.errstate(over="ignore", invalid="ignore"):
            # Chan, Golub and LeVeque, "Updating formulae for computing sample variances", 1979.
            mean, count = float(values.mean()), self._finite + values.size
            mean_shift = mean - self._mean
            self._squared_deviations += float(np.square(values - mean).sum())
            self._squared_deviations += mean_shift * mean_shift * self._finite * values.size / count
            self._mean += mean_shift * values.size / count
        scaled = values * _SCALE
        self._widen(float(scaled.min()), float(scaled.max()))
        self._counts += np.histogram(scaled, _FINE_BINS, (self._low, self._high))[0]
        self._finite = count

    def _widen(self, least: float, most: float) -> None:
        """Widen the bins until they cover `least` to `most`, by repeatedly merging pairs."""
        if not self._finite:
            spare = max(abs(least) * 1e-3, 1e-300) if least == most else 0.0
            self._low, self._high = least - spare, most + spare
        while self._high < most:
            self._high += self._high - self._low
            self._counts = np.concatenate([self._paired(), np.zeros(_FINE_BINS // 2, np.int64)])
        while self._low > least:
            self._low -= self._high - self._low
            self._counts = np.concatenate([np.zeros(_FINE_BINS // 2, np.int64), self._paired()])

    def _paired(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._counts.reshape(-1, 2).sum(1)

    def summary(self) -> dict[str, Any]:
        """For the page's script: at most `_BINS` bins over the range of the values, and figures as text."""
        facts = {"NaN": f"{self._nan:,}", "infinite": f"{self._inf:,}", "zero": f"{self._zero:,}"}
        if not self._finite:
            return {"low": 0.0, "high": 0.0, "counts": [], "facts": facts}
        (filled,) = np.nonzero(self._counts)
        each = -(-(int(filled[-1]) + 1 - int(filled[0])) // _BINS)
        counts = self._counts[filled[0] : filled[-1] + 1]
        counts = np.pad(counts, (0, -counts.size % each)).reshape(-1, each).sum(1)
        width = (self._high - self._low) / _FINE_BINS
        low = self._low + float(filled[0]) * width
        high = low + width * each * counts.size
        limit = sys.float_info.max  # an edge of the bins may exceed it
        low, high = (min(max(edge / _SCALE, -limit), limit) for edge in (low, high))
        std = math.sqrt(self._squared_deviations / self._finite)
        named = {"min": self._least, "max": self._most, "mean": self._mean, "std": std}
        return {
            "low": low,
            "high": high,
            "counts": counts.tolist(),
            "facts": {name: f"{value:.6g}" for name, value in named.items()} | facts,
        }


# Without a script -----------------------------------------------------------------------------------------


def _header(checkpoint: Checkpoint, manifest: Manifest) -> Markup:
    arrays = [leaf for leaf in manifest.leaves if leaf.stack is not None]
    dtypes = collections.Counter[str]()
    for stack in manifest.decoded_stacks:
        dtypes[stack.dtype] += math.prod(stack.array_shape) * stack.itemsize
    figures = {
        "bytes": show_bytes(checkpoint.nbytes),
        "leaves": f"{len(manifest.leaves):,}",
        "arrays": f"{len(arrays):,}",
        "objects": f"{sum(len(stack.objects) for stack in manifest.stacks):,}",
        "dtypes": ", ".join(name for name, _ in dtypes.most_common(3)) + (" …" if len(dtypes) > 3 else ""),
        "saved from": ", ".join(clipped(show_axes(mesh.axes), 60) for mesh in manifest.meshes[:2])
        + (" …" if len(manifest.meshes) > 2 else ""),
    }
    if manifest.step is not None:
        figures = {"step": f"{manifest.step.number:,}"} | figures
    metrics = _metrics(manifest)
    return joined(
        [
            element("h1", clipped(checkpoint.path, 400)),
            element("p", ", ".join(filter(None, [f"{manifest.format} checkpoint", manifest.created])), class_="soft"),
            definitions({name: figure for name, figure in figures.items() if figure}),
            *([definitions(dict(list(metrics.items())[:_MAX_METRICS]), explain=False)] if metrics else []),
        ]
    )


def _metrics(manifest: Manifest) -> dict[str, str]:
    """The metrics of a training step, as text."""
    metrics = {} if manifest.step is None else manifest.step.metrics
    texts = ["NaN" if value is None else f"{value:.6g}" for value in metrics.values()]
    return dict(zip(shorten_names(list(metrics), 60), texts, strict=True))


def _save_section(manifest: Manifest) -> Markup:
    """The seconds of each process and phase, of the slowest processes; empty if they were not recorded."""
    phases = manifest.phase_seconds
    totals = [sum(seconds) for seconds in zip(*phases.values(), strict=True)]
    longest = max(totals, default=0.0)
    if not longest:
        return Markup()
    slowest = sorted(sorted(range(len(totals)), key=lambda process: -totals[process])[:MAX_BARS])
    lines = [
        Bar(
            f"process {process}",
            _show_seconds(totals[process]),
            tuple(
                (number, seconds[process] / longest, f"{_phase(name)}: {_show_seconds(seconds[process])}")
                for number, (name, seconds) in enumerate(phases.items())
            ),
        )
        for process in slowest
    ]
    about = (
        "Time until each process had written its share; process 0 then published the checkpoint. Phases alternate;"
        " the bars show their totals."
    )
    if len(totals) > MAX_BARS:
        about += f" The slowest {MAX_BARS} of {len(totals)} processes are shown."
    names = [_phase(name) for name in phases]
    rows = [[f"process {process}", *(_show_seconds(phases[name][process]) for name in phases)] for process in slowest]
    return _section(
        "Save time by process and phase",
        element("p", about, class_="soft"),
        bars("Seconds by process and phase", lines, names),
        element("details", element("summary", "As a table"), table(["", *names], rows)),
    )


def _phase(name: str) -> str:
    return clipped(name.replace("_", " "), 30)


def _show_seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _about_section(manifest: Manifest) -> Markup:
    facts = {
        "saved": manifest.created,
        "save id": manifest.save_id,
        "libraries": ", ".join(f"{name} {version}" for name, version in manifest.libraries.items()),
        "meshes": "; ".join(
            f"{show_axes(mesh.axes)} on devices {show_ids(mesh.devices)}" for mesh in manifest.meshes[:8]
        ),
    }
    if len(metrics := _metrics(manifest)) > _MAX_METRICS:
        facts["metrics"] = ", ".join(f"{name} {value}" for name, value in metrics.items())
    pairs = [term(name) + element("dd", clipped(text, 2000), class_="mono") for name, text in facts.items() if text]
    about = [element("dl", Markup("".join(pairs)), class_="facts")]
    if manifest.metadata is not None:
        text = json.dumps(manifest.metadata, ensure_ascii=False, indent=2)
        about += [element("h3", "metadata"), element("pre", clipped(text, _MAX_METADATA_CHARS))]
    return _section("About", *about)


def _section(title: str, *content: Markup) -> Markup:
    return element("section", element("h2", title), *content)
