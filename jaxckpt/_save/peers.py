"""Passes objects' data to peers over the devices' interconnect: permutations of a bounded number of bytes.

each channel:   own objects ─▶ one stream of bytes ─▶ rounds of a jitted permutation ─▶ a stream ─▶ a peer's objects

The caller's thread starts the permutations one after another, as JAX requires for collectives, after all processes are
prepared. From then on, every process takes part in all rounds, even if it fails or is interrupted.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import msgspec
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxckpt._devices.exchange import n_sending_devices, transfer_context
from jaxckpt._job.collectives import CollectiveCalls
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import extent
from jaxckpt._model.pieces import Bytes
from jaxckpt._model.stacks import Stack
from jaxckpt._save.copies import Channel, Copies
from jaxckpt._save.staging import StagedObject
from jaxckpt._save.write_plan import Object
from jaxckpt.errors import PeerFailedError

ROUND_BYTES = 32 << 20
"""Bytes per round and process. The device needs twice this memory, and the host three times."""

_STATE_HEADER_BYTES = 8
"""Bytes for the length of a process's state, which comes first in each of its streams."""


class Round(msgspec.Struct, frozen=True, array_like=True):
    """One permutation of bytes over a channel."""

    channel: int
    n_bytes: int
    """Bytes that each process sends. The last round of a stream is padded, so that few compiled programs suffice."""

    senders: list[int]
    """The processes that send."""

    def pairs(self, channels: Sequence[Channel]) -> Channel:
        """(sender, receiver) of this round."""
        return tuple(pair for pair in channels[self.channel] if pair[0] in self.senders)


@dataclass(slots=True)
class Transfer:
    """The exchange between the processes of a save, decided when its path is claimed."""

    rounds: Sequence[Round] = ()
    data: str = ""
    """Name of the data folder. Empty until all processes have claimed the path."""


def plan_rounds(channels: Sequence[Channel], stream_bytes: Sequence[Sequence[int]], max_bytes: int) -> list[Round]:
    """The rounds that transfer these numbers of bytes of each process over each channel."""
    max_bytes = rounded_bytes(min(ROUND_BYTES, max_bytes))
    rounds: list[tuple[int, Round]] = []
    for channel, pairs in enumerate(channels):
        left = {giver: stream_bytes[giver][channel] for giver, _ in pairs}
        for start in range(0, max(left.values(), default=0), max_bytes):
            senders = [giver for giver, n_bytes in left.items() if n_bytes > start]
            n_bytes = min(max_bytes, rounded_bytes(max(left.values()) - start))
            rounds.append((start, Round(channel, n_bytes, senders)))
    rounds.sort(key=lambda one: one[0])  # the channels in turn, so that data for several channels is freed early
    return [one for _, one in rounds]


def rounded_bytes(n_bytes: int) -> int:
    """Round up so that sizes of rounds repeat and their programs are reused. Adds at most 0.4 % above 1 MiB."""
    unit = max(4 << 10, 1 << max(0, n_bytes.bit_length() - 9))
    return -(-n_bytes // unit) * unit


def stream_bytes(copies: Copies, state: bytes | None) -> list[int]:
    """Bytes that this process sends over each channel."""
    head = 0 if state is None else _STATE_HEADER_BYTES + len(state)
    return [head + sum(obj.n_bytes for obj in sent) for sent in copies.sent]


Transfers = CollectiveCalls[Round, Bytes | None]
"""One for each round. It is given the data that this process sends, and returns the data that it receives."""


def transfers(copies: Copies, rounds: Sequence[Round], process: int) -> Transfers:
    """All rounds of a save. All processes take part in each."""
    permutations = functools.cache(Permutations)

    def run(one: Round, given: Bytes | None) -> Bytes | None:
        return permutations(process).run(one.pairs(copies.channels), one.n_bytes, given)

    return CollectiveCalls(rounds, run)


def transfer_copies(
    staged: Generator[StagedObject],
    stacks: Sequence[Stack],
    copies: Copies,
    calls: Transfers,
    process: int,
    state: bytes | None,
    keep_state: Callable[[int, bytes], None],
) -> Generator[StagedObject]:
    """The objects staged here and those that peers send. Makes the `calls` of `transfers`.

    `keep_state` is called with the number of another process and the state of that process.
    """
    header = b"" if state is None else len(state).to_bytes(_STATE_HEADER_BYTES, "little") + state
    outgoing: list[_Outgoing | None] = [None] * len(copies.channels)
    incoming: list[_Incoming | None] = [None] * len(copies.channels)
    wanted: dict[Object, list[_Outgoing]] = {}
    for number, pairs in enumerate(copies.channels):
        for sender, receiver in pairs:
            if sender == process:
                outgoing[number] = out = _Outgoing(header)
                for obj in copies.sent[number]:
                    wanted.setdefault(obj, []).append(out)
            if receiver == process:
                keep = None if state is None else functools.partial(keep_state, sender)
                incoming[number] = _Incoming(copies.received[number], stacks, keep)
    with contextlib.closing(staged):
        for one in calls:
            out = outgoing[one.channel] if process in one.senders else None
            while out is not None and out.waiting_bytes < one.n_bytes and (found := next(staged, None)) is not None:
                for stream in wanted.get(found.obj, ()):
                    stream.add(replace(found, groups=[*found.groups]))
                yield found
            got = calls.run_next(None if out is None else out.take(one.n_bytes))
            into = incoming[one.channel]
            if got is not None and into is not None:
                yield from into.add(got)
        yield from staged


class _Outgoing:
    """The data that a process sends over a channel, as one stream."""

    def __init__(self, head: bytes) -> None:
        self._parts = deque[Bytes | StagedObject]([np.frombuffer(head, np.uint8)])
        self.waiting_bytes = len(head)
        """Bytes that have been added and not yet taken."""

    def add(self, staged: StagedObject) -> None:
        self._parts.append(staged)
        self.waiting_bytes += staged.obj.n_bytes

    def take(self, n_bytes: int) -> Bytes:
        """The next bytes, padded with zeros."""
        taken = np.empty(n_bytes, np.uint8)
        filled = 0
        while filled < n_bytes and self._parts:
            part = self._parts.popleft()
            if isinstance(part, StagedObject):
                part = np.ascontiguousarray(part.data().array()).reshape(-1).view(np.uint8)
            now = part[: n_bytes - filled]
            taken[filled : filled + len(now)] = now
            filled += len(now)
            self.waiting_bytes -= len(now)
            if len(now) < len(part):
                self._parts.appendleft(part[len(now) :])
        taken[filled:] = 0
        return taken


@dataclass(slots=True)
class _ReceiveBuffer:
    """Bytes that come in several rounds."""

    data: Bytes
    filled_bytes: int = 0


class _Incoming:
    """The data that a process receives over a channel, as one stream."""

    def __init__(
        self, objects: Sequence[Object], stacks: Sequence[Stack], keep_state: Callable[[bytes], None] | None
    ) -> None:
        self._objects = deque(objects)
        self._stacks = stacks
        self._keep_state = keep_state
        self._state: _ReceiveBuffer | None = None
        self._current: _ReceiveBuffer | None = (
            None if keep_state is None else _ReceiveBuffer(np.empty(_STATE_HEADER_BYTES, np.uint8))
        )

    def add(self, got: Bytes) -> Generator[StagedObject]:
        """Add received bytes. Yields the objects that are complete."""
        while len(got):
            if self._current is None:
                if not self._objects:
                    return  # the rest is padding
                self._current = _ReceiveBuffer(np.empty(self._objects[0].n_bytes, np.uint8))
            current = self._current
            now = got[: len(current.data) - current.filled_bytes]
            current.data[current.filled_bytes : current.filled_bytes + len(now)] = now
            current.filled_bytes += len(now)
            got = got[len(now) :]
            if current.filled_bytes < len(current.data):
                return
            self._current = None
            if self._keep_state is None:
                yield self._staged(self._objects.popleft(), current.data)
            elif self._state is None:
                self._state = self._current = _ReceiveBuffer(
                    np.empty(int.from_bytes(current.data.tobytes(), "little"), np.uint8)
                )
            else:
                self._keep_state(current.data.tobytes())
                self._keep_state = None

    def _staged(self, obj: Object, data: Bytes) -> StagedObject:
        dtype = np.dtype(DTYPES[self._stacks[obj.stack].dtype])
        array = data.view(dtype).reshape(extent(obj.box))
        return StagedObject(obj, dtype, extent(obj.box)[0], [[(obj.box, array, ...)]], obj.n_bytes)


# Over the interconnect ------------------------------------------------------------------------------------


class Permutations:
    """Permutations of the processes. Each sends and receives bytes in host memory."""

    def __init__(self, process: int) -> None:
        devices: dict[int, list[Any]] = {}
        for device in jax.devices():
            devices.setdefault(device.process_index, []).append(device)
        self._process = process
        self._width = 1 << min(map(n_sending_devices, devices.values())).bit_length() - 1
        self._mesh = Mesh(np.array([devices[one][: self._width] for one in sorted(devices)]), ("process", "own"))
        self._devices = devices[process][: self._width]

    def run(self, pairs: Channel, n_bytes: int, data: Bytes | None) -> Bytes | None:
        """Send bytes, or zeros, and return the bytes from the sender of this process, if any. Every process."""
        mine = np.zeros(n_bytes, np.uint8) if data is None else data
        along = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        with transfer_context(self._mesh):
            try:
                places = [SingleDeviceSharding(device) for device in self._devices]
                parts = jax.device_put([*mine.view(np.uint32).reshape(self._width, -1)], places)
                words = jax.make_array_from_single_device_arrays((self._mesh.size * parts[0].size,), along, parts)
                moved = jax.block_until_ready(_permuter(self._mesh, pairs)(words))
            except (RuntimeError, ValueError) as error:  # raised by XLA, for example if a peer died
                raise PeerFailedError(
                    f"process {self._process} could not exchange copies with its peers: {error}"
                ) from error
            if all(getter != self._process for _, getter in pairs):
                return None
            by_device = {shard.device: np.asarray(shard.data) for shard in moved.addressable_shards}
        return np.concatenate([by_device[device] for device in self._devices]).view(np.uint8)


@functools.lru_cache(maxsize=256)
def _permuter(mesh: Mesh, pairs: Channel) -> Any:
    """The jitted function: words of each process → words of its sender."""

    def permuted(words: Any) -> Any:
        return lax.ppermute(words, "process", pairs)

    along = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(permuted, mesh=mesh, in_specs=along, out_specs=along, check_vma=False))
