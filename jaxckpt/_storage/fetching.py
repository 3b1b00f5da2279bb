"""Arrays on an object store: an object passes through memory, put or fetched in one request and checked as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from jaxckpt._format import zarr
from jaxckpt._format.grid import Box, volume
from jaxckpt._format.pieces import Array, Pieces
from jaxckpt._format.stacks import Stack, indexed_objects_of
from jaxckpt._runtime.errors import DataError
from jaxckpt._storage.errors import storage_errors
from jaxckpt._storage.objects import ArrayReader, Pending
from jaxckpt._storage.tensors import ROOT_CONTEXT, TensorReader, begin_write, open_array


def _own_memory(context: ts.Context) -> ts.Context:
    """Memory that nothing else uses, and that is freed with the context."""
    return ts.Context({"memory_key_value_store#own": {}}, parent=context)


def _in_memory(path: str = "") -> dict[str, Any]:
    return {"driver": "memory", "path": path, "memory_key_value_store": "memory_key_value_store#own"}


# Writing --------------------------------------------------------------------------------------------------


class EncodingWriter:
    """Writes objects that are encoded in memory, at once; what is left to wait for is one request."""

    def __init__(self, url: str, stack: Stack, begin_put: Callable[[str, bytes, str], Pending]) -> None:
        self._url = url
        self._stack = stack
        self._begin_put = begin_put  # of a key below the data folder, its content and its digest
        self._memory = open_array(_in_memory(), stack, _own_memory(ROOT_CONTEXT))

    def write(self, index: tuple[int, ...], pieces: Pieces) -> Pending:
        key = zarr.object_key(self._stack, index)
        below = key.removeprefix(f"{self._stack.name}/")
        memory = self._memory.kvstore
        assert memory is not None
        with storage_errors(f"cannot encode {self._url}/{key}"):
            begin_write(self._memory, pieces).result()
            content = memory.read(below).result().value
            memory.write(below, None).result()
        view = np.frombuffer(content, np.uint8)
        digest = zarr.digest(lambda start, stop: view[start:stop], self._stack, len(content))
        return self._begin_put(key, content, digest)


# Reading --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Object:
    """An object that boxes are read of."""

    index: tuple[int, ...]
    key: str
    n_elements: int
    length: int
    digest: str

    wanted: int = 0
    """Elements that the planned reads want."""

    reads: int = 0
    """Reads that are still to take something of it."""

    coming: Pending | None = None
    is_here: bool = False


def wanted_whole(
    stack: Stack, stored: Mapping[str, tuple[int, str]], plan: Iterable[Sequence[Box]], most_bytes: int
) -> dict[tuple[int, ...], _Object]:
    """The objects of at most so many bytes that the planned reads want whole, by place in the grid."""
    found: dict[tuple[int, ...], _Object] = {}
    for boxes in plan:
        touched = set[tuple[int, ...]]()
        for box in boxes:
            for index, common, whole in indexed_objects_of(stack, box):
                if index not in found:
                    place = "/".join(map(str, index))
                    found[index] = _Object(index, f"c/{place}", volume(whole), *stored[place])
                found[index].wanted += volume(common)
                touched.add(index)
        for index in touched:
            found[index].reads += 1
    return {i: one for i, one in found.items() if one.wanted == one.n_elements and one.length <= most_bytes}


class FetchingReader(ArrayReader):
    """Reads a stack. The objects that are wanted whole are fetched in one request each and decoded in memory; of others
    the chunks that are wanted are requested."""

    def __init__(
        self,
        url: str,
        keys: ts.KvStore,
        base: dict[str, Any],
        context: ts.Context,
        stack: Stack,
        objects: Mapping[tuple[int, ...], _Object],
    ) -> None:
        self._url = url  # these three are of the stack's folder
        self._keys = keys
        self._base = base
        self._stack = stack
        self._objects = objects
        self._context = _own_memory(context)
        self._memory = ts.KvStore.open(_in_memory(), context=self._context).result()
        self._direct = TensorReader(open_array(base, stack, context))

    def _fetched(self, box: Box) -> list[_Object]:
        """The objects that a box touches and that are fetched whole."""
        found = (self._objects.get(index) for index, _, _ in indexed_objects_of(self._stack, box))
        return [one for one in found if one is not None]

    def held_bytes(self, boxes: Sequence[Box]) -> int:
        return sum({one.key: one.length for box in boxes for one in self._fetched(box)}.values())

    def read(self, wanted: Sequence[tuple[Box, Array]]) -> list[Pending]:
        touched = [self._fetched(box) for box, _ in wanted]
        if not any(touched):
            return self._direct.read(wanted)
        reading = _Reading(self, wanted, touched)
        for one in reading.objects.values():
            if one.coming is None and not one.is_here:
                one.coming = self._keys.read(one.key)
        return [_BoxOfReading(reading, number) for number in range(len(wanted))]

    def problem(self, one: _Object) -> str | None:
        """Wait for an object; what is wrong with it, or None if it is in memory now."""
        if one.is_here:
            return None
        assert one.coming is not None
        with storage_errors(f"cannot read {self._url}{one.key}", reading=True):
            found = one.coming.result()
        one.coming = None
        if found.state != "value":
            return f"{self._url}{one.key} is missing"
        if len(found.value) != one.length:
            return f"{self._url}{one.key} is {len(found.value)} bytes long, expected {one.length}"
        content = np.frombuffer(found.value, np.uint8)
        read = lambda start, stop: content[start:stop]  # noqa: E731
        for _, reason in zarr.problems(read, self._stack, one.index, one.length, one.digest):
            return f"{self._url}{one.key} {reason}"
        self._memory.write(one.key, found.value).result()
        one.is_here = True
        return None

    def decode(self, objects: Iterable[_Object], wanted: Sequence[tuple[Box, Array]]) -> list[Pending]:
        """Start to read boxes, of these objects from memory and of others from the store."""
        layers: list[dict[str, Any]] = [{"base": self._base}]
        layers += [{"exact": one.key, "base": _in_memory(one.key)} for one in objects]
        stacked = open_array({"driver": "kvstack", "layers": layers}, self._stack, self._context)
        return TensorReader(stacked).read(wanted)

    def drop(self, objects: Iterable[_Object]) -> None:
        """One read takes nothing more of these objects."""
        for one in objects:
            one.reads -= 1
            if not one.reads:
                one.is_here = False
                self._memory.write(one.key, None).result()


class _Reading:
    """A read of several boxes, whose objects are on their way."""

    def __init__(
        self, reader: FetchingReader, wanted: Sequence[tuple[Box, Array]], touched: Sequence[Sequence[_Object]]
    ) -> None:
        self.objects = {one.key: one for objects in touched for one in objects}
        self._reader = reader
        self._wanted = wanted
        self._touched = touched
        self._to_come = len(wanted)
        self._problems: dict[str, str] = {}
        self._pending: dict[int, Pending] | None = None

    def result(self, number: int) -> None:
        """Wait for one of the boxes."""
        if self._pending is None:
            self._pending = self._begin()
        for one in self._touched[number]:
            if one.key in self._problems:
                raise DataError(self._problems[one.key])
        self._pending[number].result()
        self._to_come -= 1
        if not self._to_come:
            self._reader.drop(self.objects.values())

    def _begin(self) -> dict[int, Pending]:
        """Wait for the objects, and start to decode the boxes that are sound."""
        for key, one in self.objects.items():
            if problem := self._reader.problem(one):
                self._problems[key] = problem
        sound = [n for n, found in enumerate(self._touched) if not any(one.key in self._problems for one in found)]
        if not sound:
            return {}
        here = [one for key, one in self.objects.items() if key not in self._problems]
        return dict(zip(sound, self._reader.decode(here, [self._wanted[n] for n in sound]), strict=True))


@dataclass(frozen=True, slots=True)
class _BoxOfReading:
    reading: _Reading
    number: int

    def result(self) -> None:
        self.reading.result(self.number)
