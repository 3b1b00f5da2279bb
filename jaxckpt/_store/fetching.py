"""Arrays on an object store: each object is encoded in memory, transferred in one request, and checked as a whole."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorstore as ts

from jaxckpt._model import zarr
from jaxckpt._model.grid import Box, volume
from jaxckpt._model.object_index import digest_of_content, problem_of
from jaxckpt._model.pieces import Array, Pieces
from jaxckpt._model.stacks import Stack, indexed_objects_of
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.workers import note_progress
from jaxckpt._store.hedging import HedgedKeys, HedgedRead
from jaxckpt._store.storage_errors import translate_array_errors
from jaxckpt._store.store import ArrayReader, ObjectRecord
from jaxckpt._store.tensors import ENCODING_MEMORY_FACTOR, ROOT_CONTEXT, TensorReader, begin_write, open_array
from jaxckpt.errors import DataError


def _own_memory(context: ts.Context) -> ts.Context:
    """A separate memory store, which is freed with its context."""
    return ts.Context({"memory_key_value_store#own": {}}, parent=context)


def _in_memory(path: str = "") -> dict[str, Any]:
    return {"driver": "memory", "path": path, "memory_key_value_store": "memory_key_value_store#own"}


# Writing --------------------------------------------------------------------------------------------------


class EncodingWriter:
    """Encodes objects in memory immediately, then writes each with one request."""

    memory_factor: ClassVar[int] = ENCODING_MEMORY_FACTOR

    def __init__(self, url: str, stack: Stack, begin_put: Callable[[str, bytes, str], Pending[ObjectRecord]]) -> None:
        self._url = url
        self._stack = stack
        self._begin_put = begin_put  # called with a key below the data folder, its content and its digest
        self._memory = open_array(_in_memory(), stack, _own_memory(ROOT_CONTEXT))

    def write(self, index: tuple[int, ...], pieces: Pieces, content: bool = False) -> Pending[ObjectRecord]:
        assert not content, "object stores have no links"
        key = zarr.object_key(self._stack, index)
        below = key.removeprefix(f"{self._stack.name}/")
        memory = self._memory.kvstore
        assert memory is not None
        with translate_array_errors(f"cannot encode {self._url}/{key}"):
            begin_write(self._memory, pieces).result()
            encoded = memory.read(below).result().value
            memory.write(below, None).result()
        return self._begin_put(key, encoded, digest_of_content(encoded, self._stack))


# Reading --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Object:
    """An object that is fetched whole, and the planned reads that need it."""

    index: tuple[int, ...]
    key: str
    n_elements: int
    length: int
    digest: str

    needed_elements: int = 0
    """Number of elements that the planned reads need."""

    remaining_reads: int = 0
    """Number of reads that still need this object."""

    pending: HedgedRead | None = None
    is_in_memory: bool = False


def objects_to_fetch(
    stack: Stack, stored: Mapping[str, tuple[int, str]], plan: Iterable[Sequence[Box]], max_bytes: int
) -> dict[tuple[int, ...], _Object]:
    """The objects to fetch whole, by grid index. They have at most `max_bytes` of data, and the planned reads need all
    their elements."""
    most = max_bytes + stack.index_bytes + 4 * stack.chunks_per_object  # with index and checksums
    objects: dict[tuple[int, ...], _Object] = {}
    for boxes in plan:
        touched = set[tuple[int, ...]]()
        for box in boxes:
            for index, common, whole in indexed_objects_of(stack, box):
                if index not in objects:
                    index_key = zarr.index_key(index)
                    objects[index] = _Object(index, f"c/{index_key}", volume(whole), *stored[index_key])
                objects[index].needed_elements += volume(common)
                touched.add(index)
        for index in touched:
            objects[index].remaining_reads += 1
    return {i: obj for i, obj in objects.items() if obj.needed_elements == obj.n_elements and obj.length <= most}


class FetchingReader(ArrayReader):
    """Reads a stack. Objects that are needed whole are fetched in one request each and decoded in memory. From other
    objects, only the needed chunks are requested."""

    def __init__(
        self,
        url: str,
        keys: HedgedKeys,
        base: dict[str, Any],
        context: ts.Context,
        stack: Stack,
        objects: Mapping[tuple[int, ...], _Object],
    ) -> None:
        self._url = url  # `url` and `keys` refer to the stack's folder
        self._keys = keys
        self._stack = stack
        self._objects = objects
        context = _own_memory(context)
        self._memory = ts.KvStore.open(_in_memory(), context=context).result()
        layers = [{"exact": obj.key, "base": _in_memory(obj.key)} for obj in objects.values()]
        layered = {"driver": "kvstack", "layers": [{"base": base}, *layers]} if layers else base
        self._array = TensorReader(open_array(layered, stack, context))

    def _fetched_objects(self, box: Box) -> list[_Object]:
        """The objects that a box touches and that are fetched whole."""
        candidates = (self._objects.get(index) for index, _, _ in indexed_objects_of(self._stack, box))
        return [obj for obj in candidates if obj is not None]

    def buffered_bytes(self, boxes: Sequence[Box]) -> int:
        return sum({obj.key: obj.length for box in boxes for obj in self._fetched_objects(box)}.values())

    def read(self, targets: Sequence[tuple[Box, Array]]) -> list[Pending[None]]:
        touched = [self._fetched_objects(box) for box, _ in targets]
        if not any(touched):
            return self._array.read(targets)
        for obj in itertools.chain.from_iterable(touched):
            if obj.pending is None and not obj.is_in_memory:
                obj.pending = self._keys.read(obj.key, n_bytes=obj.length)
        land = functools.cache(functools.partial(self._finish_read, targets, touched))
        return [_PendingBox(land, number) for number in range(len(targets))]

    def _finish_read(
        self, targets: Sequence[tuple[Box, Array]], touched: Sequence[Sequence[_Object]]
    ) -> list[Exception | None]:
        """Wait for the objects of a read and decode its boxes. Returns the error of each box, if any."""
        objects = {obj.key: obj for obj in itertools.chain.from_iterable(touched)}
        problems = {key: self._load(obj) for key, obj in objects.items()}
        errors: list[Exception | None] = [
            next((DataError(problem) for obj in box_objects if (problem := problems[obj.key])), None)
            for box_objects in touched
        ]
        sound = [number for number, error in enumerate(errors) if error is None]
        for number, pending in zip(sound, self._array.read([targets[number] for number in sound]), strict=True):
            try:
                pending.result()
            except (ValueError, NotImplementedError) as error:  # tensorstore's
                errors[number] = error
            note_progress()
        for obj in objects.values():
            obj.remaining_reads -= 1
            if not obj.remaining_reads:
                obj.is_in_memory = False
                self._memory.write(obj.key, None).result()
        return errors

    def _load(self, obj: _Object) -> str | None:
        """Wait for an object. Returns the error, or None if the object is now in memory."""
        if obj.is_in_memory:
            return None
        where = f"{self._url}{obj.key}"
        assert obj.pending is not None
        with translate_array_errors(f"cannot read {where}", reading=True):
            result = obj.pending.result()
        note_progress()
        obj.pending = None
        if result.state != "value":
            return f"{where} is missing"
        if problem := problem_of(result.value, self._stack, obj.index, obj.length, obj.digest):
            return f"{where} {problem}"
        self._memory.write(obj.key, result.value).result()
        obj.is_in_memory = True
        return None


@dataclass(frozen=True, slots=True)
class _PendingBox:
    """The pending result of one box. All boxes of a read finish together."""

    finish_read: Callable[[], list[Exception | None]]
    number: int

    def done(self) -> bool:
        return False  # what was fetched must still be decoded

    def result(self) -> None:
        if error := self.finish_read()[self.number]:
            raise error
