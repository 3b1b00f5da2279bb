"""Compares what must be equal in every process of a save, before the first byte is written.

Each process sends one digest for each thing that can differ, so that the error names it. Values are also compared: the
Python values in the tree, and replicated integer scalars such as an optimizer's count. If one process has missed a
call, they show that the processes are at different training steps, whose shards must not form one checkpoint.
"""

from __future__ import annotations

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

from jaxckpt._devices.device_to_host import start_copies
from jaxckpt._devices.interconnect import transfer_context
from jaxckpt._devices.shardings import processes_of
from jaxckpt._job.rendezvous import Rendezvous, process_names
from jaxckpt._model import typed_json
from jaxckpt._options import StagingMemory
from jaxckpt._save.describe import Draft
from jaxckpt._save.staging import may_be_shared
from jaxckpt._save.write_plan import SavePlan
from jaxckpt.errors import PeersDisagreeError, show_lines, show_path

_MAX_GROUPS = 64
"""Largest number of checksums that a process sends for the values of one set of holders."""

_REASONS = {
    "leaves": "the leaves of the tree, their shapes or their dtypes",
    "ties": "which leaves share one array",
    "shardings": "the shardings of the leaves",
    "options": "Options or Checkpointer keep_last_of",
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
    """For each group of values, a checksum; None in a process that does not hold them."""

    numbers: list[int] = []
    """Numbers that process 0 needs, whether they are equal or not."""


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """A group of compared values."""

    holders: frozenset[int]
    """The processes that hold the values; an empty set means all."""

    values: Sequence[tuple[str, str]]
    """(path, value as text) of each leaf."""


@dataclass(frozen=True, slots=True)
class OwnFingerprint:
    """What a process computes for its message before the caller may donate or change anything."""

    digests: dict[str, str]
    values: Sequence[_ComparedValue]
    process: int

    @classmethod
    def of(
        cls, draft: Draft, plan: SavePlan, metadata: Any, state_names: Sequence[str] | None, process: int
    ) -> OwnFingerprint:
        layouts = {layout: number for number, layout in enumerate(dict.fromkeys(leaf.layout for leaf in draft.arrays))}
        forms = {leaf.number: (leaf.dtype, leaf.shape) for leaf in draft.arrays}
        forms |= {number: forms[first] for number, first in draft.ties.items()}  # they share a row
        entries = {
            "leaves": (
                msgspec.json.encode(draft.structure),
                [(record.path, record.kind) for record in draft.records],
                sorted(forms.items()),
            ),
            "shardings": (
                [(layout.grid, layout.holders) for layout in layouts],
                [(layouts[leaf.layout], leaf.is_exchanged) for leaf in draft.arrays],
            ),
            "ties": [*draft.ties.items()],
            "options": (plan.stacks, plan.leaves),  # the part of the plan that the entries above do not determine
            "metadata": json.dumps(metadata, sort_keys=True),
            "process_state": None if state_names is None else sorted(state_names),
        }
        digests = {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in entries.items()}
        return cls(digests, _compared_values(draft, process), process)

    def complete(self, numbers: Sequence[int] = ()) -> tuple[Fingerprint, Sequence[ValueGroup]]:
        """The message of this process, with these numbers, and its groups. Waits for values that devices still
        compute."""
        groups = list(_value_groups(self.values))
        sums = [
            zlib.crc32(repr([value for _, value in group.values]).encode())
            if not group.holders or self.process in group.holders
            else None
            for group in groups
        ]
        return Fingerprint(self.digests, sums, [*numbers]), groups


def gather_agreed(
    rendezvous: Rendezvous, fingerprint: OwnFingerprint | None, numbers: Sequence[int] = ()
) -> list[list[int]]:
    """Some numbers of each process, in process 0; an empty list in the others.

    Raises PeersDisagreeError in process 0 unless all processes save the same.
    """
    own, groups = fingerprint.complete(numbers) if fingerprint else (Fingerprint({}, [], [*numbers]), [])
    with rendezvous.call.phases.timed("barrier"):
        texts = rendezvous.gather(msgspec.json.encode(own).decode())
    fingerprints = [typed_json.decode(text, Fingerprint) for text in texts]
    if len(fingerprints) > 1:
        require_equal_fingerprints(fingerprints, groups)
    return [fingerprint.numbers for fingerprint in fingerprints]


def require_equal_fingerprints(fingerprints: Sequence[Fingerprint], groups: Sequence[ValueGroup]) -> None:
    """In process 0, raise PeersDisagreeError unless all processes sent the same message."""
    for name, reason in _REASONS.items():
        unequal = [
            process
            for process, fingerprint in enumerate(fingerprints)
            if fingerprint.digests[name] != fingerprints[0].digests[name]
        ]
        if unequal:
            raise PeersDisagreeError(
                f"{process_names(unequal)} {'differs' if len(unequal) == 1 else 'differ'} from process 0 in {reason};"
                f" every process must pass the same global tree and the same arguments.{_ADVICE.get(name, '')}"
            )
    problems: list[str] = []
    for number, group in enumerate(groups):
        sums = {
            process: fingerprint.checksums[number]
            for process, fingerprint in enumerate(fingerprints)
            if fingerprint.checksums[number] is not None
        }
        first = min(sums, default=0)
        unequal = [process for process, checksum in sums.items() if checksum != sums[first]]
        if unequal:
            leaves = [
                show_path(path) + (f" ({value[:40]} in process 0)" if not first else "") for path, value in group.values
            ]
            shown = ", ".join(leaves[:3]) + (f", or one of {len(leaves) - 3} others" if len(leaves) > 3 else "")
            problems.append(f"{shown}: {process_names(unequal)} and process {first} differ")
    if problems:
        raise PeersDisagreeError(
            "the processes hold different values for leaves that must be equal in all of them. One process may have"
            " skipped a call and be at a different training step. Pass state that differs by process as"
            " process_state=. Leaves:\n" + show_lines(problems)
        )


@dataclass(slots=True)
class _ComparedValue:
    holders: frozenset[int]
    path: str
    value: Any
    """The value as text, or an array."""

    is_count: bool = False
    """Whether the array is an integer, which is shown. Otherwise its checksum is."""

    def text(self) -> str:
        if isinstance(self.value, str):
            return self.value
        array = np.asarray(self.value)
        return str(int(array)) if self.is_count else f"checksum {zlib.crc32(array.tobytes())}"


def _compared_values(draft: Draft, process: int) -> list[_ComparedValue]:
    """Python values, and replicated integer scalars. The arrays among them are copies.

    Values that a conversion reads from its source are not compared: process 0 reads and writes them.
    """
    everyone = frozenset[int]()
    in_manifest = (record for record in draft.records if record.value is not None)
    values = [_ComparedValue(everyone, record.path, record.value) for record in in_manifest]
    for number, value in draft.values.items():
        path = draft.records[number].path
        # Arrays that are local to each process are taken from process 0. Those in the state of an object are compared,
        # because the object's future behavior depends on them.
        in_state = number in draft.state_leaves and not getattr(value, "committed", False)
        if isinstance(value, np.ndarray | jax.Array) and (in_state or draft.records[number].kind in ("str", "bytes")):
            values.append(_ComparedValue(everyone, path, value))
        elif isinstance(value, jax.Array) and _is_replicated_count(value):
            holders = processes_of(value.sharding)
            if len(holders) > 1:
                own = value.addressable_data(0) if process in holders else ""
                values.append(_ComparedValue(holders, path, own, is_count=True))
    _protect(values, draft.staging_memory)
    return values


def _protect(values: Sequence[_ComparedValue], memory: StagingMemory) -> None:
    """Protect the values from later changes by the caller. Copies from accelerators to pinned memory are only started:
    they end when the training steps that compute the arrays do. The other arrays are read."""
    copied: list[_ComparedValue] = []
    for entry in values:
        if isinstance(entry.value, jax.Array) and not may_be_shared(entry.value):
            copied.append(entry)
        else:
            entry.value = entry.text()
    with transfer_context(None):
        copies = start_copies([entry.value for entry in copied], memory)
    for entry, copy in zip(copied, copies, strict=True):
        entry.value = copy


def _value_groups(values: Sequence[_ComparedValue]) -> Iterator[ValueGroup]:
    by_holders: dict[frozenset[int], list[tuple[str, str]]] = {}
    for entry in values:
        by_holders.setdefault(entry.holders, []).append((entry.path, entry.text()))
    for holders, named_values in by_holders.items():
        size = -(-len(named_values) // _MAX_GROUPS)
        for first in range(0, len(named_values), size):
            yield ValueGroup(holders, named_values[first : first + size])


def _is_replicated_count(value: jax.Array) -> bool:
    integer = value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.integer)
    return integer and value.committed and value.is_fully_replicated
