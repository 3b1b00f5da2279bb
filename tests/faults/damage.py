"""A small checkpoint with many kinds of leaves, a map of its bytes, and every way to read it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import PROGRAMS, environment
from reliability import Fault

import jaxckpt
from jaxckpt._model.dtypes import DTYPES

Box = tuple[tuple[int, int], ...]
Bits = tuple[str, tuple[int, ...], bytes]
Kept = dict[str, Bits]
"""The bits of each leaf, by its path."""

KINDS = ("data", "chunk crc", "index", "index crc", "zarr.json", "manifest", "process state")
TYPED = (jaxckpt.CorruptError, jaxckpt.errors.NotACheckpointError)


def make(version: int = 0) -> dict[str, Any]:
    """A tree in which every value depends on the version, except "zeros" and "empty"."""
    draw = np.random.default_rng(version)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))

    def put(array: np.ndarray, *spec: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    return {
        "split": put(draw.normal(size=(16, 36)).astype(np.float32), "a", "b"),
        "half": [put(draw.normal(size=(6, 20)).astype(ml_dtypes.bfloat16), "a") for _ in range(2)],
        "packed": [jax.numpy.asarray(draw.normal(size=24).astype(np.float32)) for _ in range(9)],
        "twin": put(draw.integers(1, 1 << 30, size=(16, 36)).astype(np.int32), "a", "b"),
        "int4": draw.integers(-8, 8, size=(5, 30)).astype(ml_dtypes.int4),
        "complex": draw.normal(size=(7, 11)).astype(np.complex64) * (1 + 2j),
        "bool": draw.random(size=50) < 0.5,
        "scalars": [np.float64(draw.normal()) for _ in range(6)],
        "key": jax.random.key(version + 1),
        "text": f"version {version}",
        "number": version,
        "zeros": jax.numpy.zeros((4, 10)),
        "empty": np.empty((0, 3)),
    }


def data_of(path: Path) -> str:
    """The name of a checkpoint's data folder."""
    return f"data-{json.loads((path / 'manifest.json').read_bytes())['save_id']}"


def save(path: Path, version: int = 0, compression: Any = None) -> jaxckpt.SaveInfo:
    options = jaxckpt.Options(chunk_bytes=128, object_bytes=512, compression=compression, sync=False)
    return jaxckpt.save(path, make(version), options=options, process_state={"at": version})


def bits(leaf: Any) -> Bits:
    """The dtype, shape and bytes of a leaf, regardless of its location. For a PRNG key, those of its raw data."""
    if isinstance(leaf, str | bytes):
        leaf = np.frombuffer(leaf.encode() if isinstance(leaf, str) else leaf, np.uint8)
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()


def bits_of(tree: Any) -> Kept:
    return {
        "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys): bits(leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


# Map of the bytes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Area:
    """Bytes of one kind in one file."""

    kind: str
    file: str
    """Path of the file, relative to the checkpoint's path."""

    start: int
    stop: int

    box: Box = ()
    """The box of the stack that is lost with these bytes; () if they do not belong to an array."""

    leaves: dict[int, str] = field(default_factory=dict)
    """Path of the leaf in each row of the stack."""

    sides: tuple[int, ...] = ()
    """Sides of the chunk if the bytes are its uncompressed elements, otherwise ()."""

    itemsize: int = 1

    def hit(self, place: int) -> dict[str, Box]:
        """The leaves that a damaged byte affects, each with the affected box: one element if it can be determined."""
        box = self.box
        if self.sides:
            at = np.unravel_index((place - self.start) // self.itemsize, self.sides)
            element = tuple((low + int(i), low + int(i) + 1) for (low, _), i in zip(box, at, strict=True))
            # A byte in the padding of an edge chunk affects no element, but `verify` still reports the chunk.
            if all(stop <= high for (_, stop), (_, high) in zip(element, box, strict=True)):
                box = element
        return lost(box, self.leaves)


def lost(box: Box, leaves: dict[int, str]) -> dict[str, Box]:
    """The box of each leaf that is lost if a box of its stack is lost."""
    return {leaves[row]: box[1:] for row in range(*box[0]) if row in leaves} if box else {}


def areas(path: Path) -> list[Area]:
    """The areas that cover every byte of a checkpoint, as docs/format.md specifies."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    data = data_of(path)
    found = [Area("manifest", "manifest.json", 0, (path / "manifest.json").stat().st_size)]
    found += [
        Area("process state", f"{data}/process-{number}.json", 0, length)
        for number, (length, _) in enumerate(manifest["process_states"])
    ]
    for number, stack in enumerate(manifest["stacks"]):
        rows = {leaf["row"]: leaf["path"] for leaf in manifest["leaves"] if leaf.get("stack") == number}
        file = f"{data}/{stack['name']}/zarr.json"
        found.append(Area("zarr.json", file, 0, (path / file).stat().st_size))
        for key in stack["objects"]:
            found += _object_areas(path, f"{data}/{stack['name']}/c/{key}", key, stack, rows)
    return found


def _object_areas(path: Path, file: str, key: str, stack: dict[str, Any], rows: dict[int, str]) -> Iterator[Area]:
    content = (path / file).read_bytes()
    whole = (stack["rows"], *stack["shape"])
    grid = [obj // chunk for obj, chunk in zip(stack["object"], stack["chunk"], strict=True)]
    begin = [int(place) * obj for place, obj in zip(key.split("/"), stack["object"], strict=True)]
    index = len(content) - 16 * int(np.prod(grid)) - 4
    for number, (start, size) in enumerate(np.frombuffer(content[index:-4], "<u8").reshape(-1, 2).tolist()):
        if start == (1 << 64) - 1:
            continue
        low = [b + int(i) * c for b, i, c in zip(begin, np.unravel_index(number, grid), stack["chunk"], strict=True)]
        box = tuple((a, min(a + c, n)) for a, c, n in zip(low, stack["chunk"], whole, strict=True))
        exact = () if "compression" in stack else tuple(stack["chunk"])
        itemsize = DTYPES[stack["dtype"]].itemsize
        yield Area("data", file, start, start + size - 4, box, rows, exact, itemsize)
        yield Area("chunk crc", file, start + size - 4, start + size, box, rows)
    box = tuple((b, min(b + o, n)) for b, o, n in zip(begin, stack["object"], whole, strict=True))
    yield Area("index", file, index, len(content) - 4, box, rows)
    yield Area("index crc", file, len(content) - 4, len(content), box, rows)


# Reading --------------------------------------------------------------------------------------------------


class Subject:
    """A checkpoint that is damaged in place and restored afterward, and an undamaged copy."""

    def __init__(self, folder: Path, compression: Any = None, version: int = 0) -> None:
        folder.mkdir(parents=True)
        self.version = version
        self.path, self.spare = folder / "ckpt", folder / "spare"
        self.info = save(self.path, version, compression)
        save(self.spare, version)
        self.areas = areas(self.path)
        self.files = sorted({area.file for area in self.areas})
        self.wanted = bits_of(make(version))
        other = Mesh(np.array(jax.devices()[:3]), ("b",))
        self.ways: dict[str, Callable[[], Kept]] = {
            "restore": lambda: bits_of(jaxckpt.restore(self.path)),
            "restore onto another mesh": lambda: bits_of(jaxckpt.restore(self.path, mesh=other, specs=P())),
            "load_numpy": lambda: bits_of(jaxckpt.load_numpy(self.path)),
        }
        silents: list[str] = []
        assert self._read(silents, self.wanted) == {"correct bits"}, silents
        assert jaxckpt.verify(self.path).ok

    def held(self, name: str) -> dict[str, dict[str, Box]]:
        """For a file, or each file in a folder, the leaves stored in it and the box of each leaf."""
        found: dict[str, dict[str, Box]] = {}
        for area in self.areas:
            if (area.file == name or area.file.startswith(f"{name}/")) and area.kind not in ("data", "chunk crc"):
                found[area.file] = area.hit(area.start)
        return found

    @contextlib.contextmanager
    def content(self, contents: dict[str, bytes]) -> Generator[None]:
        """Temporarily overwrite files of the checkpoint with other contents."""
        whole = {file: (self.path / file).read_bytes() for file in contents}
        try:
            for file, content in contents.items():
                assert content != whole[file]
                (self.path / file).write_bytes(content)
            yield
        finally:
            for file, content in whole.items():
                (self.path / file).write_bytes(content)

    @contextlib.contextmanager
    def aside(self, name: str) -> Generator[Path]:
        """Temporarily move a file or folder out of the checkpoint; yields its new path. Deletes its replacement."""
        kept, place = self.path.parent / "kept", self.path / name
        os.rename(place, kept)
        try:
            yield kept
        finally:
            if place.is_dir() and not place.is_symlink():
                place.rmdir()
            elif place.exists():
                place.unlink()
            os.rename(kept, place)

    def judge(
        self, fault: Fault, what: str, hits: dict[str, dict[str, Box]], *, swapped: bool = False, quick: bool = True
    ) -> None:
        """Read the damaged checkpoint in every way, and count the outcome.

        `hits` maps each damaged file to the affected leaves and boxes. `swapped` means that each chunk is valid but
        belongs elsewhere. `quick` means that the quick check must find the damage too.
        """
        silents: list[str] = []
        hit = {leaf for leaves in hits.values() for leaf in leaves}
        ends = self._read(silents, hit, swapped=swapped)
        self._blame(silents, hits, quick=quick)
        if silents:
            fault.silent(f"{what}: {', '.join(silents)}")
        elif "other data" in ends:
            fault.saw("error; partial reads of swapped objects pass")
        elif ends == {"error"}:
            fault.saw("every read an error")
        else:
            fault.saw("error; correct bits if the damage is not read")

    def _read(self, silents: list[str], hit: Collection[str], *, swapped: bool = False) -> set[str]:
        """The outcomes of the reads: "error", "correct bits", "other data". Adds silent wrong data to `silents`."""
        ends = set[str]()
        for way, read in self.ways.items():
            try:
                found = read()
            except TYPED:
                ends.add("error")
                continue
            ends.add("correct bits")
            if found != self.wanted:
                silents.append(f"{way}: {[leaf for leaf in self.wanted if found.get(leaf) != self.wanted[leaf]][:3]}")
        try:
            delta = jaxckpt.diff(self.path, self.spare)
            ends.add("correct bits")
            if not delta.identical:
                silents.append(f"diff: {delta}")
        except TYPED:
            ends.add("error")
        try:
            opened = jaxckpt.open(self.path)
        except TYPED:
            return ends | {"error"}
        for leaf in {*list(hit)[:4], "split", "packed/3", "number"}:
            try:
                found = bits(opened[leaf].value)
            except TYPED:
                ends.add("error")
                continue
            ends.add("correct bits" if found == self.wanted[leaf] else "other data")
            if found != self.wanted[leaf] and not swapped:
                silents.append(f"open: {leaf}")
        try:
            if opened.process_states != [{"at": self.version}]:
                silents.append("process_states")
        except TYPED:
            ends.add("error")
        return ends

    def _blame(self, silents: list[str], hits: dict[str, dict[str, Box]], *, quick: bool) -> None:
        """Check that `verify` names each damaged file, and each affected leaf with a box around the damage."""
        try:
            report = jaxckpt.verify(self.path)
            if quick and jaxckpt.verify(self.path, quick=True).ok:
                silents.append("quick verify")
        except jaxckpt.errors.NotACheckpointError:
            assert list(hits) == ["manifest.json"]
            return
        if report.ok:
            silents.append("verify")
            return
        for file, leaves in hits.items():
            blamed = [problem for problem in report.problems if problem.object == file]
            assert blamed, (file, str(report))
            for leaf, box in leaves.items():
                assert any(within(box, problem.box) for problem in blamed if problem.leaf == leaf), (
                    leaf,
                    box,
                    str(report),
                )


def within(box: Box, other: Box | None) -> bool:
    return other is not None and all(a >= c and b <= d for (a, b), (c, d) in zip(box, other, strict=True))


# Orbax ----------------------------------------------------------------------------------------------------


class OrbaxReader:
    """A process that reads an Orbax checkpoint on request. It first saves the checkpoint if none exists."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, PROGRAMS / "orbax_reader.py", str(path), str(not path.exists())],
            env=environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._hear(120) == "ready"
        assert self.read() == self.read() == "correct bits"

    def read(self) -> str:
        """The outcome of one read, alternating between two ways: "correct bits", "other values", "error", "a crash" or
        "a hang"."""
        assert self._process.stdin is not None
        self._process.stdin.write("read\n")
        self._process.stdin.flush()
        return self._hear(60)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def _hear(self, seconds: float) -> str:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self._process.kill()
            self._process.wait(30)
            return "a hang"
        said = self._process.stdout.readline().strip()
        if not said:
            self._process.wait(30)
        return said or "a crash"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(30)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
