"""The chunks of an object's data in memory: where they lie, or gathered; and the digest of what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxckpt._format import zarr
from jaxckpt._format.grid import Box, contains, within
from jaxckpt._format.pieces import Array, Bytes, Pieces
from jaxckpt._format.stacks import Stack


def chunks_of(
    stack: Stack, index: tuple[int, ...], pieces: Pieces, empty: Callable[[], object]
) -> Iterator[tuple[Sequence[int], Bytes]]:
    """(numbers of chunks in the object, their data one after the other) until all are there.

    The data stays as it is until `empty` is called: then what was yielded must have been used.
    """
    size = stack.chunk_stored_bytes - 4
    scratch, used = np.empty(0, np.uint8), 0
    for part in pieces.apart(stack.chunk):
        array = part.alone
        in_order = array is not None and array.flags.c_contiguous
        run = zarr.numbers_in_one_run(stack, index, part.box) if in_order else None
        if array is not None and run is not None:
            yield run, array.reshape(-1).view(np.uint8)
            continue
        for block in zarr.chunk_runs(stack, index, part.box):
            data = None if array is None else in_place(block.box, part.box, array)
            if data is None:
                needed = block.chunks * size
                if used + needed > len(scratch):
                    empty()
                    used = 0
                    if needed > len(scratch):
                        scratch = np.empty(max(needed, zarr.RUN_BYTES), np.uint8)
                data = part.gathered(block.box, scratch[used:])
                used += needed
            yield block.numbers, data


def in_place(block: Box, box: Box, target: Array) -> Bytes | None:
    """The bytes of `target`, which holds `box`, that a block of chunks fills; None unless all of it is there in one
    piece."""
    if not contains(box, block):
        return None
    place = target[within(block, box)]
    return place.reshape(-1).view(np.uint8) if place.flags.c_contiguous else None


def content_digest(stack: Stack, index: tuple[int, ...], pieces: Pieces) -> str:
    """XXH3 with 128 bits of what an object's chunks hold before they are compressed, as docs/format.md defines it."""
    import xxhash  # only here: a save that compares no content does without

    size = stack.chunk_stored_bytes - 4
    entries: list[tuple[int, bytes]] = []
    for numbers, data in chunks_of(stack, index, pieces, lambda: None):
        elements: list[Any] = list(data.reshape(-1, size))
        digests = map(xxhash.xxh3_128_digest, elements)
        entries += zip(numbers, digests, strict=True)
    return xxhash.xxh3_128_hexdigest(
        b"".join(number.to_bytes(8, "little") + found for number, found in sorted(entries))
    )
