"""Compares what must be equal in every process of a save, before the first byte is written.

Each process sends one digest for each thing that can differ, so that the error names it. Values are also compared: the
Python values in the tree, and replicated integer scalars such as an optimizer's count. If one process has missed a
call, they show that the processes are at different training steps, whose shards must not form one checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxckpt._runtime.errors import PeersDisagreeError, show_lines, show_path
from jaxckpt._runtime.processes import process_names
from jaxckpt._save.describe import Draft
from jaxckpt._save.plan import SavePlan

_MAX_GROUPS = 64
"""Largest number of checksums that a process sends for the values of one set of holders."""

_REASONS = {
    "leaves": "the leaves of the tree, their shapes or their dtypes",
    "ties": "which leaves share one array",
    "shardings": "the shardings of the leaves",
    "options": "Options or Checkpointer components",
    "metadata": "metadata",
    "process_state": "the names in process_state",
}
_ADVICE: dict[str, str] = dict.fromkeys(
    ["leaves", "shardings"],
    " An array that each process committed to a device of its own is not global: replicate it over the mesh, or pass it"
    " as NumPy, which process 0 then writes. If the state of an object differs, such as a data iterator's,"
    " pass it as process_state= instead.",
)


class Fingerprint(msgspec.Struct, frozen=True):
    """The message of one process."""

    digests: dict[str, str]
    """Digest of each compared thing, by its key in `_REASONS`."""

    checksums: list[int | None]
    """For each bucket of values, a checksum; None in a process that does not hold them."""


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """A group of compared values."""

    holders: frozenset[int]
    """The processes that hold the values; an empty set means all."""

    values: Sequence[tuple[str, str]]
    """(path, value as text) of each leaf."""


def compute_fingerprint(
    draft: Draft, plan: SavePlan, metadata: Any, state_names: Sequence[str] | None, process: int
) -> tuple[Fingerprint, list[ValueGroup]]:
    """The message of this process, and the groups of values in it."""
    layouts = {layout: number for number, layout in enumerate(dict.fromkeys(leaf.layout for leaf in draft.arrays))}
    given = {
        "leaves": (
            msgspec.json.encode(draft.structure),
            [(record.path, record.kind) for record in draft.records],
            sorted([(leaf.number, leaf.dtype, leaf.shape) for leaf in draft.arrays] + _tied(draft)),
        ),
        "shardings": (
            [(layout.grid, layout.holders) for layout in layouts],
            [(layouts[leaf.layout], leaf.is_exchanged) for leaf in draft.arrays],
        ),
        "ties": [*draft.ties.items()],
        "options": (plan.stacks, plan.members),  # the part of the plan that the entries above do not determine
        "metadata": json.dumps(metadata, sort_keys=True),
        "process_state": None if state_names is None else sorted(state_names),
    }
    digests = {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in given.items()}
    groups = list(_value_groups(draft, process))
    sums = [
        zlib.crc32(repr([value for _, value in bucket.values]).encode())
        if not bucket.holders or process in bucket.holders
        else None
        for bucket in groups
    ]
    return Fingerprint(digests, sums), groups


def _tied(draft: Draft) -> list[tuple[int, str, tuple[int, ...]]]:
    """Number, dtype and shape of the leaves that share a row with an earlier leaf."""
    forms = {leaf.number: (leaf.dtype, leaf.shape) for leaf in draft.arrays} if draft.ties else {}
    return [(number, *forms[first]) for number, first in draft.ties.items()]


def require_agreement(fingerprints: Sequence[Fingerprint], groups: Sequence[ValueGroup]) -> None:
    """In process 0, raise PeersDisagreeError unless all processes sent the same message."""
    for name, reason in _REASONS.items():
        others = [
            process for process, one in enumerate(fingerprints) if one.digests[name] != fingerprints[0].digests[name]
        ]
        if others:
            raise PeersDisagreeError(
                f"{process_names(others)} {'differs' if len(others) == 1 else 'differ'} from process 0 in {reason};"
                f" every process must pass the same global tree and the same arguments.{_ADVICE.get(name, '')}"
            )
    problems: list[str] = []
    for number, bucket in enumerate(groups):
        sums = {
            process: one.checksums[number]
            for process, one in enumerate(fingerprints)
            if one.checksums[number] is not None
        }
        first = min(sums, default=0)
        others = [process for process, found in sums.items() if found != sums[first]]
        if others:
            leaves = [
                show_path(path) + (f" ({value[:40]} in process 0)" if not first else "")
                for path, value in bucket.values
            ]
            shown = ", ".join(leaves[:3]) + (f", or one of {len(leaves) - 3} others" if len(leaves) > 3 else "")
            problems.append(f"{shown}: {process_names(others)} and process {first} differ")
    if problems:
        raise PeersDisagreeError(
            "the processes hold different values for leaves that must be equal in all of them. One process may have"
            " skipped a call and be at a different training step. Pass state that differs by process as"
            " process_state=. Leaves:\n" + show_lines(problems)
        )


def _value_groups(draft: Draft, process: int) -> Iterator[ValueGroup]:
    """The compared values: Python values, and replicated integer scalars."""
    held: dict[frozenset[int], list[tuple[str, str]]] = {}
    for record in draft.records:
        if record.value is not None:
            held.setdefault(frozenset(), []).append((record.path, record.value))
    for number, value in draft.values.items():
        # Arrays that are local to each process are taken from process 0. Those in the state of an object are compared,
        # because the object's future behavior depends on them.
        in_state = number in draft.state_leaves and not getattr(value, "committed", False)
        if in_state or draft.records[number].kind in ("str", "bytes"):
            text = f"checksum {zlib.crc32(np.asarray(value).tobytes())}"  # too long to be shown
            held.setdefault(frozenset(), []).append((draft.records[number].path, text))
        elif isinstance(value, jax.Array) and _is_replicated_count(value):
            holders = _processes(value.sharding)
            if len(holders) == 1:
                continue
            text = str(int(value.addressable_data(0))) if process in holders else ""
            held.setdefault(holders, []).append((draft.records[number].path, text))
    for holders, values in held.items():
        size = -(-len(values) // _MAX_GROUPS)
        for first in range(0, len(values), size):
            yield ValueGroup(holders, values[first : first + size])


def _is_replicated_count(value: jax.Array) -> bool:
    integer = value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.integer)
    return integer and value.committed and value.is_fully_replicated


@functools.lru_cache(maxsize=1024)
def _processes(sharding: jax.sharding.Sharding) -> frozenset[int]:
    return frozenset(device.process_index for device in sharding.device_set)
