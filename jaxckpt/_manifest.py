"""manifest.json: what a checkpoint holds, published last. docs/format.md is its specification.

Decoding checks everything that can be checked without opening another file, before anything is allocated.
"""

from __future__ import annotations

import base64
import collections
import errno
import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from jaxckpt import _zarr as zarr
from jaxckpt._errors import DataError, InputError, ManifestError, NotACheckpointError, StorageError, listing
from jaxckpt._grid import Spec, spec_problem
from jaxckpt._plan import Stack
from jaxckpt._store import MANIFEST, SEAL, Store, is_data, is_sealed
from jaxckpt._tree import (
    DTYPES,
    MAX_RANK,
    Structure,
    decode_value,
    encode_value,
    is_utf8,
    paths_of,
    prune,
    selector,
    show,
)

FORMAT = "jaxckpt"
VERSION = 1

LARGEST_BYTES = 64 << 20
"""Of a manifest that is written or read. 16,000 leaves in 500,000 objects (32 TB at 64 MiB each) make 16 MB; decoding
takes up to 25 bytes of memory for each."""

MAX_NESTING = 500
"""Arrays and objects of a manifest may nest this deep: a tree of 200 containers takes 402. JSON parsers recurse."""

MAX_INDEX_BYTES = 64 << 20
"""Of one object's index, which tensorstore holds in memory whole: 4 million chunks."""

LARGEST = 1 << 62
"""Of any number, such as a step's and an array's bytes: beyond it offsets would overflow."""

_ZSTD_MOST = 1 << 15  # RFC 8878: a block holds at most 128 KiB and takes at least 4 bytes
_MAX_AXES = 64  # of a mesh, which is a NumPy array
_SHOWN = 500  # characters of a problem

Size = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class MeshRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mesh that leaves were laid out on."""

    axes: dict[str, Size]
    """Size of each axis, in order."""

    devices: list[Size]
    """Ids of its devices, in row-major order of the axes."""

    types: list[str]
    """For each axis: "Auto", "Explicit" or "Manual"."""


class LayoutRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How leaves lay on devices when they were saved: on a mesh by a spec, or on one device they were committed to.

    With neither they were uncommitted: JAX put them on its default device and may move them.
    """

    mesh: Size | None = None
    """Number of the mesh."""

    spec: list[list[str]] = []
    """For each leading dimension, the mesh axes that split it."""

    device: Size | None = None
    """Id of the one device."""

    memory: str | None = None
    """Memory kind, where it was not the device's default."""

    opaque: bool = False
    """Whether it was a sharding of several devices that is no NamedSharding, and so cannot be written down."""


class LeafRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A leaf: an array in a row of a stack, or a small value here."""

    path: str

    kind: str
    """"jax", "numpy", "numpy_scalar", "key" (a typed PRNG key), "str", "bytes", "int", "float", "bool", "complex"."""

    stack: Size | None = None
    row: Size | None = None

    layout: Size | None = None
    """Number of the layout, for kinds "jax" and "key"."""

    value: str | None = None
    """The value itself as text, for a leaf that lies in no stack."""

    impl: str | None = None
    """PRNG implementation, for kind "key"; the array holds its raw data with trailing dimensions of its own."""

    weak: bool = False
    """Whether the type of a kind "jax" was weak, as that of jnp.asarray(0.5) is."""


class StackRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A Zarr array and its objects."""

    name: str
    dtype: str
    shape: list[Size]
    """Shape of one row."""

    rows: Size
    chunk: list[Size]
    object: list[Size]
    sha256: str
    """Digest of its zarr.json."""

    objects: dict[str, tuple[Size, str]]
    """For each object, by its place in the grid ("0/1/0"): its length in bytes and its digest."""

    compression: str | None = None

    @classmethod
    def of(cls, stack: Stack, objects: dict[str, tuple[int, str]]) -> StackRecord:
        return cls(
            stack.name,
            stack.dtype,
            list(stack.shape),
            stack.rows,
            list(stack.chunk),
            list(stack.object),
            hashlib.sha256(zarr.metadata(stack)).hexdigest(),
            objects,
            stack.compression,
        )

    def stored(self, index: tuple[int, ...]) -> tuple[int, str]:
        """Length and digest of the object at a place in the grid."""
        return self.objects["/".join(map(str, index))]

    def stack(self) -> Stack:
        return Stack(
            self.name,
            self.dtype,
            tuple(self.shape),
            self.rows,
            tuple(self.chunk),
            tuple(self.object),
            self.compression,
        )


class StepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a Checkpointer notes of a training step."""

    number: Size
    metrics: dict[str, float | None] = {}
    """None where the value was not finite."""

    dropped: list[str] = []
    """Paths of the subtrees that were dropped since it was saved."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """All that is known of a checkpoint without reading its arrays."""

    format: str
    version: int
    save_id: str
    created: str
    """UTC, ISO 8601. For people; nothing depends on it."""

    libraries: dict[str, str]
    metadata: Any
    """The user's own, any JSON."""

    tree: Structure
    leaves: list[LeafRecord]
    meshes: list[MeshRecord]
    layouts: list[LayoutRecord]
    stacks: list[StackRecord]

    process_states: list[tuple[Size, str]] = []
    """For each process that saved, length and SHA-256 of the file of its own state; none where none was given."""

    step: StepRecord | None = None
    """Where a Checkpointer saved it."""

    phase_seconds: dict[str, list[Seconds]] = {}
    """For each phase of the save, the seconds that each process had spent in it when it had written its share. For
    people; nothing depends on it."""

    @property
    def data(self) -> str:
        """Name of the folder that holds the arrays."""
        return f"data-{self.save_id}"

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each leaf by its path."""
        return dict(zip([leaf.path for leaf in self.leaves], range(len(self.leaves)), strict=True))

    @functools.cached_property
    def arrays(self) -> list[Stack]:
        """The stacks as plans take them."""
        return [record.stack() for record in self.stacks]

    def place(self, leaf: LeafRecord) -> tuple[int, int]:
        """(stack, row) of a leaf that lies in a stack."""
        assert leaf.stack is not None, leaf
        assert leaf.row is not None, leaf
        return leaf.stack, leaf.row

    def leaf_shape(self, leaf: LeafRecord) -> tuple[int, ...]:
        """Shape of a leaf that lies in a stack, of the raw data where it is a PRNG key."""
        return tuple(self.stacks[self.place(leaf)[0]].shape)

    def leaf_bytes(self, leaf: LeafRecord) -> int:
        """Bytes of the data of a leaf; 0 of one that lies in no stack."""
        if leaf.stack is None:
            return 0
        return math.prod(self.leaf_shape(leaf)) * DTYPES[self.stacks[leaf.stack].dtype].itemsize

    def leaf_layout(self, leaf: LeafRecord) -> tuple[MeshRecord | None, Spec, LayoutRecord]:
        """(mesh, spec, record) of the layout a leaf was saved in."""
        record = self.layouts[leaf.layout] if leaf.layout is not None else LayoutRecord()
        mesh = None if record.mesh is None else self.meshes[record.mesh]
        return mesh, tuple(tuple(axes) for axes in record.spec), record


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, its last member the SHA-256 of all the bytes before that member.

    Raises InputError if `decode` would refuse it: it is decoded here, before it takes the place of an older one. That
    takes 5 ms for 2,000 leaves, 60 ms for 20,000 leaves in 10,000 containers.
    """
    try:
        body = msgspec.json.encode(manifest, enc_hook=_plain)[:-1]
    except (TypeError, ValueError) as error:
        raise InputError(f"the checkpoint cannot be described as JSON: {str(error)[:_SHOWN]}") from error
    for stack in manifest.arrays:
        if stack.index_bytes > MAX_INDEX_BYTES:
            raise InputError(
                f"an object of stack {stack.name} would have {stack.chunks_per_object} chunks: give larger"
                " Options.chunk_bytes or smaller object_bytes"
            )
    problem = _too_long(body)
    if problem:
        raise InputError(f"the manifest {problem}: give larger Options.object_bytes, or less metadata")
    content = body + SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}'
    try:
        decode(content, manifest.data)
    except ManifestError as error:
        raise InputError(f"no reader would take this checkpoint, so it is not published: {error}") from error
    return content


def _plain(value: object) -> object:
    """A value of a class derived from float, int or str, such as np.float64, as msgspec takes it."""
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"a {type(value).__name__} is no JSON")


def decode(content: bytes, where: str) -> Manifest:
    """The manifest, checked. Raises ManifestError."""
    problem = _too_long(content)
    if problem:
        raise ManifestError(f"{where}/{MANIFEST} {problem}")
    if nesting(content) > MAX_NESTING:
        raise ManifestError(f"{where}/{MANIFEST} is nested deeper than {MAX_NESTING}")
    if not is_sealed(content):
        raise _refusal(content, where, "is damaged or was edited: it does not match the SHA-256 at its own end")
    body = content.rpartition(SEAL)[0] + b"}"
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
        # What encodes to the same bytes repeats no member; msgspec would have kept the last of them without a word.
        if msgspec.json.encode(manifest) != body:
            json.loads(body, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise _refusal(content, where, f"is malformed: {str(error)[:_SHOWN]}") from error
    # Each check trusts what the ones before it have looked at.
    found = (
        list(itertools.islice(check(manifest), 20)) for check in (_head_problems, _layout_problems, _tree_problems)
    )
    problems = [problem[:_SHOWN] for problem in next(filter(None, found), [])]
    if problems:
        raise _refusal(content, where, f"contradicts itself:\n{listing(problems)}")
    return manifest


def _refusal(content: bytes, where: str, reason: str) -> ManifestError:
    """Why a manifest cannot be read; first of all its version, since a newer one may be sealed and made otherwise."""
    version = _version_of(content)
    if version is not None and version > VERSION:
        reason = f"is of format version {version}; this jaxckpt reads up to {VERSION}. Update jaxckpt."
    return ManifestError(f"{where}/{MANIFEST} {reason}")


def state_name(process: int) -> str:
    """Name of the file, in the data folder, of what one process alone knew."""
    return f"process-{process}.json"


def encode_state(state: Mapping[str, Any]) -> bytes:
    """A process's own state as the file it is stored in. Raises InputError unless it comes back as it is."""
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"process_state must be a mapping of names to bytes or JSON, found {type(state).__name__}")
    items: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(name, str) or not is_utf8(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"the names in process_state must be str (UTF-8), found {ascii(name)[:80]}")
        if isinstance(value, bytes):
            items[name] = {"base64": base64.b64encode(value).decode()}
        else:
            items[name] = {"json": _through_json(value, f"process_state[{name!r}]")}
    return json.dumps(items, ensure_ascii=False).encode()


def decode_state(content: bytes) -> dict[str, Any]:
    """What `encode_state` was given. Raises ValueError where it is something else."""
    if nesting(content) > MAX_NESTING:
        raise ValueError(f"nested deeper than {MAX_NESTING}")
    state: dict[str, Any] = {}
    for name, item in msgspec.convert(
        json.loads(content, object_pairs_hook=_distinct), dict[str, dict[str, Any]]
    ).items():
        match item:
            case {"base64": str(text), **rest} if not rest:
                state[name] = base64.b64decode(text, validate=True)
            case {"json": value, **rest} if not rest:
                state[name] = value
            case _:
                raise ValueError(f"{name[:40]!r} is neither json nor base64")
    return state


def require_json(value: Any, what: str) -> None:
    """Raise InputError unless a user's value comes back equal from the JSON of a manifest."""
    plain = _through_json(value, what)
    try:
        same = msgspec.json.decode(msgspec.json.encode(value, enc_hook=_plain)) == plain
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{what} must be plain JSON: {error}") from error
    if not same:
        raise InputError(f"{what} must be plain JSON: it would not come back equal")


def _through_json(value: Any, what: str) -> Any:
    """A user's value as it comes back from JSON. Raises InputError unless that is equal."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        if nesting(text) > MAX_NESTING - 2:  # where it lies two deep, in a file of its own or in the manifest
            raise ValueError(f"nested deeper than {MAX_NESTING - 2}")
        plain = json.loads(text)
        same = bool(plain == value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{what} must be plain JSON: {error}") from error
    if not same:
        raise InputError(f"{what} must be plain JSON (str keys, lists for tuples): it would not come back equal")
    return plain


def load_states(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    """Each process's own state, in order of the processes that saved. Raises DataError."""
    states: list[dict[str, Any]] = []
    keys = [f"{manifest.data}/{state_name(process)}" for process in range(len(manifest.process_states))]
    contents = store.read_all(keys)
    for process, (key, content) in enumerate(zip(keys, contents, strict=True)):
        length, digest = manifest.process_states[process]
        if content is None or len(content) != length or hashlib.sha256(content).hexdigest() != digest:
            what = "is missing" if content is None else "is not as it was saved"
            raise DataError(f"{store.url}/{key} {what}: it holds process {process}'s own state")
        try:
            states.append(decode_state(content))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{store.url}/{key} is malformed: {str(error)[:_SHOWN]}") from error
    return states


def without(manifest: Manifest, paths: Sequence[str]) -> Manifest | None:
    """The manifest without the subtrees at `paths`; None where they share a stack with other leaves, or are not there.

    What it names no more can be deleted once it is published.
    """
    dropped = selector(paths)
    kept = [number for number, leaf in enumerate(manifest.leaves) if not dropped(leaf.path)]
    mixed = {manifest.leaves[number].stack for number in kept}
    gone = set(range(len(manifest.leaves))).difference(kept)
    if not gone or any(manifest.leaves[number].stack in mixed - {None} for number in gone):
        return None
    stacks = [number for number in range(len(manifest.stacks)) if number in mixed]
    numbers = {old: new for new, old in enumerate(stacks)}
    leaves = [
        leaf if leaf.stack is None else msgspec.structs.replace(leaf, stack=numbers[leaf.stack])
        for leaf in map(manifest.leaves.__getitem__, kept)
    ]
    step = manifest.step or StepRecord(0)
    return msgspec.structs.replace(
        manifest,
        tree=prune(manifest.tree, {old: new for new, old in enumerate(kept)}),
        leaves=leaves,
        stacks=[manifest.stacks[number] for number in stacks],
        step=msgspec.structs.replace(step, dropped=sorted({*step.dropped, *paths})),
    )


def data_of(content: bytes) -> str | None:
    """The data folder that a manifest names, if that much can be told of one that may be damaged."""
    found = re.search(rb'"save_id":"([0-9A-Za-z_-]{1,200})"', content)
    return f"data-{found.group(1).decode()}" if found else None


class _Head(msgspec.Struct):
    format: str
    version: int


def _version_of(content: bytes) -> int | None:
    try:
        return msgspec.json.decode(content, type=_Head).version
    except (ValueError, RecursionError):  # a UnicodeDecodeError is no DecodeError of msgspec
        return None


def _too_long(content: bytes) -> str | None:
    return f"is {len(content)} bytes long, over {LARGEST_BYTES}" if len(content) > LARGEST_BYTES else None


_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_PLAIN = bytes(set(range(256)) - set(b'"[]{}'))


def nesting(text: bytes) -> int:
    """How deep the arrays and objects of JSON nest, told without recursion.

    Up to the first error in the text, where every parser stops, it sees the strings as a parser does.
    """
    if b"\\" in text:  # pairs first: a quote after one more backslash ends no string
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two quotes without a bracket between them are nothing.
    found = np.frombuffer(text.translate(None, _PLAIN).replace(b'""', b""), np.uint8)
    outside = np.cumsum(found == ord('"'), dtype=np.uint8) & 1 == 0
    return int(np.cumsum(_STEPS[found[outside]], dtype=np.int32).max(initial=0))


def _distinct(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError where a member repeats."""
    found = dict(members)
    if len(found) != len(members):
        counted = collections.Counter(name for name, _ in members)
        raise ValueError(f"the member {counted.most_common(1)[0][0][:80]!r} repeats")
    return found


def load(store: Store, sha256: str | None = None) -> tuple[Manifest, bytes]:
    """The manifest of the checkpoint at a store, and its bytes; `sha256` is what theirs must be, if it is known.

    Raises NotACheckpointError, ManifestError.
    """
    content = store.read(MANIFEST)
    if content is None:
        raise NotACheckpointError(f"{store.url} is not a checkpoint: {_why_not(store)}")
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256.lower():
        raise ManifestError(
            f"{store.url}/{MANIFEST} has the SHA-256 {found}, expected {sha256.lower()} by Options.manifest_sha256:"
            " it is another checkpoint, or somebody changed it"
        )
    return decode(content, store.url), content


def _why_not(store: Store) -> str:
    if store.is_file():
        return "it is a file, not a folder"
    try:
        names = store.names()
    except StorageError as error:
        if error.errno not in (errno.ENOTSUP, errno.EACCES):
            raise
        return f"it holds no manifest.json ({error})"  # it may be read all the same: over HTTP, or without that right
    if any(map(is_data, names)):
        return "a save to it is under way, or never finished: it has data but no manifest.json"
    inside = [name for name, published in store.folders().items() if published]
    if inside:
        return f"it is a folder of checkpoints; open one of them: {', '.join(inside[-5:])}"
    return "it holds no manifest.json" if names else "there is nothing there"


# Checks ---------------------------------------------------------------------------------------------------


def _head_problems(manifest: Manifest) -> Iterator[str]:
    if (manifest.format, manifest.version) != (FORMAT, VERSION):
        yield f"format {manifest.format!r} version {manifest.version}, expected {FORMAT!r} version {VERSION}"
        return
    if not _is_name(manifest.save_id):
        yield f"save_id {manifest.save_id!r} is no plain name"
    if len({len(seconds) for seconds in manifest.phase_seconds.values()}) > 1:
        yield "phase_seconds has not as many processes for each phase"


def _layout_problems(manifest: Manifest) -> Iterator[str]:
    yield from _stack_problems(manifest.stacks)
    for number, mesh in enumerate(manifest.meshes):
        if len(mesh.axes) > _MAX_AXES or math.prod(mesh.axes.values()) != len(mesh.devices) or not mesh.devices:
            yield f"mesh {number} has {len(mesh.axes)} axes {_few(mesh.axes)} for {len(mesh.devices)} devices"
        if len(set(mesh.devices)) != len(mesh.devices):
            yield f"mesh {number} names a device twice"
        if len(mesh.types) != len(mesh.axes) or not set(mesh.types) <= {"Auto", "Explicit", "Manual"}:
            yield f"mesh {number} has axis types {_few(mesh.types)} for axes {_few(mesh.axes)}"
    for number, layout in enumerate(manifest.layouts):
        if layout.mesh is not None and layout.mesh >= len(manifest.meshes):
            yield f"layout {number} is on mesh {layout.mesh}, of {len(manifest.meshes)}"
            continue
        axes = manifest.meshes[layout.mesh].axes if layout.mesh is not None else {}
        named = [axis for entry in layout.spec for axis in entry]
        if len(layout.spec) > MAX_RANK or any(axis not in axes for axis in named) or len(set(named)) != len(named):
            yield f"layout {number} has spec {_few(layout.spec)} on a mesh of axes {_few(axes)}"


def _few(items: Collection[Any]) -> str:
    """Names for a message: they are anybody's, and there may be millions."""
    return ", ".join(str(item)[:40] for item in itertools.islice(items, 8)) + (", …" if len(items) > 8 else "")


def _tree_problems(manifest: Manifest) -> Iterator[str]:
    leaves = manifest.leaves
    paths = [leaf.path for leaf in leaves]
    try:
        # Some more than there are, so that a leaf at fault can be named.
        found, numbers = paths_of(manifest.tree, len(paths) + 1000, sum(map(len, paths)) + (1 << 20))
    except ValueError as error:
        yield f"tree: {error}"
        return
    if numbers != list(range(len(leaves))):
        seen = next((seen for seen, number in enumerate(numbers) if number != seen), len(numbers))
        named = f"leaf {numbers[seen]}" if seen < len(numbers) else "no more"
        yield f"tree names {named} where leaf {seen} of {len(leaves)} would come"
        return
    if found != paths:
        at, path = next((at, path) for at, path in zip(found, paths, strict=True) if at != path)
        yield f"leaf {show(path[:200])} stands at {show(at[:200])} in the tree"
        return
    if len(manifest.numbers) != len(leaves):
        yield "several leaves share a path"
    if not _leaves_fit(manifest):
        yield from _leaf_problems(manifest)


def _leaves_fit(manifest: Manifest) -> bool:
    """Whether no leaf has a problem, told by the stack: there leaves of one kind and layout are looked at once."""
    count = len(manifest.stacks)
    members: list[list[LeafRecord]] = [[] for _ in range(count)]
    for leaf in manifest.leaves:
        if leaf.value is not None:
            if _value_problem(leaf):
                return False
        elif leaf.stack is None or leaf.stack >= count:
            return False
        else:
            members[leaf.stack].append(leaf)
    return all(_fill(manifest, stack, found) for stack, found in zip(manifest.stacks, members, strict=True))


def _fill(manifest: Manifest, stack: StackRecord, leaves: list[LeafRecord]) -> bool:
    """Whether these are the leaves of a stack, one for each row."""
    rows = [leaf.row for leaf in leaves if leaf.row is not None]
    if len(rows) != stack.rows or len(leaves) != stack.rows or sorted(rows) != list(range(stack.rows)):
        return False
    alike = {(leaf.kind, leaf.layout, leaf.impl, leaf.weak): leaf for leaf in leaves}
    return not any(_array_problem(manifest, leaf) for leaf in alike.values())


def _leaf_problems(manifest: Manifest) -> Iterator[str]:
    """What is wrong, leaf by leaf."""
    holders: dict[tuple[int | None, int], str] = {}
    for leaf in manifest.leaves:
        problem = _array_problem(manifest, leaf) if leaf.value is None else _value_problem(leaf)
        if not problem and leaf.value is None:
            stack = manifest.stacks[leaf.stack or 0]
            if leaf.row is None or leaf.row >= stack.rows:
                problem = f"is row {leaf.row} of stack {stack.name}, which has {stack.rows}"
            elif (leaf.stack, leaf.row) in holders:
                problem = f"shares its row with {show(holders[leaf.stack, leaf.row][:200])}"
            else:
                holders[leaf.stack, leaf.row] = leaf.path
        if problem:
            yield f"leaf {show(leaf.path[:200])} {problem}"
    if len(holders) != sum(stack.rows for stack in manifest.stacks):
        yield f"{len(holders)} leaves for {sum(stack.rows for stack in manifest.stacks)} rows of stacks"


def _value_problem(leaf: LeafRecord) -> str | None:
    """What is wrong with a leaf that has a value."""
    assert leaf.value is not None, leaf
    try:
        canonical = encode_value(decode_value(leaf.kind, leaf.value)) == (leaf.kind, leaf.value)
    except ValueError as error:
        return f"has no value of kind {leaf.kind[:40]!r}: {str(error)[:200]}"
    if not canonical:
        return f"has {leaf.value[:40]!r} for a value of kind {leaf.kind!r}"
    if (leaf.stack, leaf.row, leaf.layout, leaf.impl) != (None,) * 4 or leaf.weak:
        return "has a value, and so no stack, row, layout or impl, and no weak type"
    return None


def _array_problem(manifest: Manifest, leaf: LeafRecord) -> str | None:
    """What is wrong with a leaf that has none, whatever its path and row."""
    if leaf.kind not in ("jax", "numpy", "numpy_scalar", "key", "str", "bytes"):
        return f"is of unknown kind {leaf.kind[:40]!r}"
    if leaf.stack is None or leaf.stack >= len(manifest.stacks):
        return f"is in stack {leaf.stack}, of {len(manifest.stacks)}"
    stack = manifest.stacks[leaf.stack]
    if leaf.layout is not None and leaf.layout >= len(manifest.layouts):
        return f"has layout {leaf.layout}, of {len(manifest.layouts)}"
    if leaf.layout is not None and leaf.kind not in ("jax", "key"):
        return f"is of kind {leaf.kind!r} and has a layout"
    if (leaf.kind == "key") != (leaf.impl is not None):
        return "must name a PRNG implementation if, and only if, it is a key"
    if leaf.weak and leaf.kind != "jax":
        return f"is of kind {leaf.kind!r} and has a weak type"
    if leaf.kind == "key" and (stack.dtype != "uint32" or not stack.shape):
        return f"is a key but is stored as {stack.dtype} of shape {stack.shape}"
    if leaf.kind == "numpy_scalar" and stack.shape:
        return f"is a scalar but is stored with shape {stack.shape}"
    if leaf.layout is not None:
        mesh, spec, _ = manifest.leaf_layout(leaf)
        shape = stack.shape[:-1] if leaf.kind == "key" else stack.shape
        problem = spec_problem(mesh.axes if mesh else {}, spec, shape)
        if problem:
            return f"has an impossible layout: {problem}"
    if leaf.kind in ("str", "bytes") and (stack.dtype != "uint8" or len(stack.shape) != 1):
        return f"is {leaf.kind} but is stored as {stack.dtype} of shape {stack.shape}"
    return None


def _stack_problems(stacks: Sequence[StackRecord]) -> Iterator[str]:
    names: set[str] = set()
    for stack in stacks:
        where = f"stack {stack.name[:80]!r}"
        if not _is_name(stack.name) or stack.name in names:
            yield f"{where} has no plain name of its own"
        names.add(stack.name)
        if stack.dtype not in DTYPES:
            yield f"{where} has unknown dtype {stack.dtype[:80]!r}"
            continue
        if stack.compression not in (None, "zstd"):
            yield f"{where} has unknown compression {stack.compression[:80]!r}"
            continue
        ranks = {len(stack.shape) + 1, len(stack.chunk), len(stack.object)}
        if len(ranks) > 1 or len(stack.shape) > MAX_RANK or not stack.rows or not _is_grid(stack):
            yield (
                f"{where} has {stack.rows} rows of [{_few(stack.shape)}] in objects of [{_few(stack.object)}],"
                f" chunks of [{_few(stack.chunk)}]"
            )
            continue
        yield from _object_problems(stack, where)


def _is_grid(stack: StackRecord) -> bool:
    """Whether a stack's sides make a grid of objects and chunks that can be counted and addressed."""
    itemsize = DTYPES[stack.dtype].itemsize
    # No side is longer than it takes to hold the array, so that what an index promises has data behind it.
    sides = all(
        0 < chunk <= max(1, n) and 0 < side <= -(-max(1, n) // chunk) * chunk and side % chunk == 0
        for n, chunk, side in zip((stack.rows, *stack.shape), stack.chunk, stack.object, strict=True)
    )
    # A side of zero counts as one: NumPy's own limit does not except it either.
    fits = stack.rows * math.prod(max(1, n) for n in stack.shape) * itemsize <= LARGEST
    return sides and fits and math.prod(stack.object) * itemsize <= LARGEST


def _object_problems(record: StackRecord, where: str) -> Iterator[str]:
    stack = record.stack()
    count = math.prod(-(-n // o) for n, o in zip(stack.array_shape, stack.object, strict=True))
    if count != len(record.objects):
        yield f"{where} lists {len(record.objects)} of its {count} objects"
        return
    if hashlib.sha256(zarr.metadata(stack)).hexdigest() != record.sha256:
        yield f"{where} has another zarr.json than its shape, dtype, chunk and object make"
        return
    index_bytes, chunk_bytes = stack.index_bytes, stack.chunk_stored_bytes
    if index_bytes > MAX_INDEX_BYTES:
        yield f"{where} has {stack.chunks_per_object} chunks in each object"
        return
    if not count:
        return
    most = index_bytes + stack.chunks_per_object * chunk_bytes
    # Along each dimension, each place with the number of its chunks that lie in the array.
    sides = [
        [(str(i), -(-(min(n, (i + 1) * o) - i * o) // c)) for i in range(-(-n // o))]
        for n, o, c in zip(stack.array_shape, stack.object, stack.chunk, strict=True)
    ]
    for place in itertools.product(*sides):
        key = "/".join([text for text, _ in place])
        length = record.objects.get(key, (-1, ""))[0]
        data_bytes = math.prod([chunks for _, chunks in place]) * chunk_bytes
        if stack.compression is None:
            fits = index_bytes + data_bytes <= length <= most
        else:
            fits = length - index_bytes >= -(-data_bytes // _ZSTD_MOST)
        if not fits:
            yield f"{where}: object {key!r} is {'missing' if length < 0 else f'{length} bytes long'}"


def _is_name(text: str) -> bool:
    return text.replace("-", "").replace("_", "").isalnum() and text.isascii() and len(text) <= 200
