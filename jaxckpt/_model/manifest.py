"""manifest.json: describes a checkpoint, and is published last. docs/format.md is its specification.

Decoding checks everything that can be checked without opening another file, before anything is allocated.
"""

from __future__ import annotations

import collections
import hashlib
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from jaxckpt._model import typed_json
from jaxckpt._model.checks import MAX_PROBLEM_CHARACTERS, VERSION, problems
from jaxckpt._model.file_names import MANIFEST, SEAL, is_sealed
from jaxckpt._model.records import Manifest, StepRecord
from jaxckpt._model.select import parse_select
from jaxckpt._model.tree import prune
from jaxckpt._model.values import decode_bytes, encode_bytes, is_utf8
from jaxckpt.errors import InputError, ManifestError, show_lines

MAX_MANIFEST_BYTES = 64 << 20
"""The largest manifest, in bytes. 16,000 leaves in 500,000 objects (32 TB at 64 MiB each) take 16 MB. Decoding takes up
to 25 bytes of memory for each byte."""

MAX_NESTING = 500
"""The greatest nesting depth of a manifest's JSON, because JSON parsers recurse. A tree of 200 containers needs 402."""


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON. Its last member is the SHA-256 of all bytes before that member.

    Raises InputError if `decode` would refuse it. To find that out before the manifest replaces an older one, this
    function decodes it, which takes 5 ms for 2,000 leaves, 60 ms for 20,000 leaves in 10,000 containers.
    """
    try:
        body = msgspec.json.encode(manifest, enc_hook=_plain)[:-1]
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the checkpoint cannot be described as JSON: {str(error)[:MAX_PROBLEM_CHARACTERS]}"
        ) from error
    problem = _length_problem(body)
    if problem:
        raise InputError(f"the manifest {problem}: give larger Options.object_bytes, or less metadata")
    content = body + SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}'
    try:
        decode(content, manifest.data_folder)
    except ManifestError as error:
        raise InputError(f"no reader would accept this checkpoint, so it is not published: {error}") from error
    return content


def _plain(value: object) -> object:
    """A value of a subclass of float, int or str, such as np.float64, as the plain type that msgspec accepts."""
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")


def decode(content: bytes, where: str, name: str = MANIFEST) -> Manifest:
    """The manifest in a file of this name, checked. Raises ManifestError."""
    file, problem = f"{where}/{name}", _length_problem(content)
    if problem:
        raise ManifestError(f"{file} {problem}")
    if nesting(content) > MAX_NESTING:
        raise ManifestError(f"{file} is nested deeper than {MAX_NESTING}")
    if not is_sealed(content):
        raise _manifest_error(content, file, "is damaged or was edited: it does not match the SHA-256 at its own end")
    body = content.rpartition(SEAL)[0] + b"}"
    try:
        manifest = typed_json.decode(body, Manifest)
        # JSON that encodes to the same bytes repeats no member. msgspec would silently keep the last of them.
        if msgspec.json.encode(manifest) != body:
            json.loads(body, object_pairs_hook=require_distinct)
    except (ValueError, RecursionError) as error:
        raise _manifest_error(content, file, f"is malformed: {str(error)[:MAX_PROBLEM_CHARACTERS]}") from error
    wrong = problems(manifest)
    if wrong:
        raise _manifest_error(content, file, f"is inconsistent:\n{show_lines(wrong)}")
    return manifest


def _manifest_error(content: bytes, file: str, reason: str) -> ManifestError:
    """The error for a manifest that cannot be read for `reason`. If its format version is newer, that is reported
    instead, because a newer format may differ entirely."""
    version = _version_of(content)
    if version is not None and version > VERSION:
        reason = f"is of format version {version}; this jaxckpt reads up to {VERSION}. Update jaxckpt."
    return ManifestError(f"{file} {reason}")


def state_file_name(process: int) -> str:
    """Name of the file for the state of one process, in the data folder."""
    return f"process-{process}.json"


def encode_state(state: Mapping[str, Any]) -> bytes:
    """The state of a process as the content of its file. Raises InputError unless decoding returns the same value."""
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"process_state must be a mapping of names to bytes or JSON, found {type(state).__name__}")
    items: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(name, str) or not is_utf8(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"the names in process_state must be str (UTF-8), found {ascii(name)[:80]}")
        if isinstance(value, bytes):
            items[name] = {"base64": encode_bytes(value)}
        else:
            items[name] = {"json": _round_trip_json(value, f"process_state[{name!r}]")}
    return json.dumps(items, ensure_ascii=False).encode()


def decode_state(content: bytes) -> dict[str, Any]:
    """The state from the output of `encode_state`. Raises ValueError for anything else."""
    if nesting(content) > MAX_NESTING:
        raise ValueError(f"nested deeper than {MAX_NESTING}")
    state: dict[str, Any] = {}
    for name, item in typed_json.convert(
        json.loads(content, object_pairs_hook=require_distinct), dict[str, dict[str, Any]]
    ).items():
        match item:
            case {"base64": str(text), **rest} if not rest:
                state[name] = decode_bytes(text)
            case {"json": value, **rest} if not rest:
                state[name] = value
            case _:
                raise ValueError(f"{name[:40]!r} is neither json nor base64")
    return state


def require_json(value: Any, what: str) -> Any:
    """A user's value after a round trip through the JSON of a manifest. Raises InputError unless it stays equal."""
    return _round_trip_json(value, what, lambda: msgspec.json.decode(msgspec.json.encode(value, enc_hook=_plain)))


def _round_trip_json(value: Any, what: str, encoded: Callable[[], Any] | None = None) -> Any:
    """A user's value after a round trip through JSON, and through `encoded` if it has another form in the file. Raises
    InputError unless it stays equal."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        if nesting(text) > MAX_NESTING - 2:  # it is nested two levels deep, in its own file or in the manifest
            raise ValueError(f"nested deeper than {MAX_NESTING - 2}")
        plain = json.loads(text)
        same = bool(plain == value) and (encoded is None or encoded() == plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{what} must be plain JSON: {_first_non_json(value, what) or error}") from error
    if not same:
        reason = _first_non_json(value, what) or "decoding it would not return an equal value"
        raise InputError(f"{what} must be plain JSON: {reason}")
    return plain


def _first_non_json(value: Any, what: str) -> str | None:
    """The first thing in a value that is not JSON; None if there is nothing, or if the value is nested too deep."""
    try:
        return next(_non_json(value, what), None)
    except RecursionError:
        return None


def _non_json(value: Any, where: str) -> Iterator[str]:
    """What in a value is not JSON, each with its place."""
    if isinstance(value, dict):
        for key, child in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                yield f"{where} has the key {reprlib.repr(key)}; the keys of JSON are str"
            yield from _non_json(child, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, child in enumerate(cast("list[Any]", value)):
            yield from _non_json(child, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{where} is {value}, which JSON does not have; use None"
    elif not isinstance(value, str | int | float | None):
        scalar = np.isscalar(value) or getattr(value, "shape", None) == ()
        kinds: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float}
        kind = kinds.get(getattr(getattr(value, "dtype", None), "kind", ""))
        use = "list(…)" if isinstance(value, tuple) else f"{kind.__name__}(…)" if scalar and kind else ""
        use = use or (".tolist()" if hasattr(value, "tolist") else "")
        yield f"{where} is of type {type(value).__name__}" + (f"; use {use}" if use else "")


def droppable(manifest: Manifest, paths: Sequence[str]) -> tuple[str, ...]:
    """The paths whose subtrees can be dropped together: they exist, and share no stack with leaves that stay."""
    leaves_by_path = {path: _leaves_below(manifest, [path]) for path in paths}
    while True:
        gone = set[int]().union(*leaves_by_path.values())
        needed = {leaf.stack for number, leaf in enumerate(manifest.leaves) if number not in gone} - {None}
        kept = {
            path
            for path, numbers in leaves_by_path.items()
            if not numbers or any(manifest.leaves[number].stack in needed for number in numbers)
        }
        if not kept:
            return tuple(leaves_by_path)
        leaves_by_path = {path: numbers for path, numbers in leaves_by_path.items() if path not in kept}


def drop_subtrees(manifest: Manifest, paths: Sequence[str]) -> Manifest:
    """The manifest without the subtrees at `paths`, which are `droppable`.

    After it is published, the files that it no longer names can be deleted.
    """
    gone, is_dropped = _leaves_below(manifest, paths), parse_select(paths)
    kept = [number for number in range(len(manifest.leaves)) if number not in gone]
    needed = {manifest.leaves[number].stack for number in kept}
    stacks = [number for number in range(len(manifest.stacks)) if number in needed]
    numbers = {old: new for new, old in enumerate(stacks)}
    leaves = [
        leaf if leaf.stack is None else msgspec.structs.replace(leaf, stack=numbers[leaf.stack])
        for leaf in map(manifest.leaves.__getitem__, kept)
    ]
    step = manifest.step or StepRecord(0)
    return msgspec.structs.replace(
        manifest,
        tree=prune(manifest.tree, {old: new for new, old in enumerate(kept)}, lambda path: not is_dropped(path)),
        leaves=leaves,
        stacks=[manifest.stacks[number] for number in stacks],
        step=msgspec.structs.replace(step, dropped=sorted({*step.dropped, *paths})),
    )


def _leaves_below(manifest: Manifest, paths: Sequence[str]) -> set[int]:
    """The numbers of the leaves that the globs or paths select."""
    selected = parse_select(paths)
    return {number for number, leaf in enumerate(manifest.leaves) if selected(leaf.path)}


class _Head(msgspec.Struct):
    format: str
    version: int


def _version_of(content: bytes) -> int | None:
    try:
        return typed_json.decode(content, _Head).version
    except (ValueError, RecursionError):  # a UnicodeDecodeError is not a msgspec.DecodeError
        return None


def _length_problem(content: bytes) -> str | None:
    return f"is {len(content)} bytes long, over {MAX_MANIFEST_BYTES}" if len(content) > MAX_MANIFEST_BYTES else None


_DEPTH_CHANGES = np.zeros(256, np.int8)
_DEPTH_CHANGES[list(b"[{")], _DEPTH_CHANGES[list(b"]}")] = 1, -1
_PLAIN = bytes(set(range(256)) - set(b'"[]{}'))


def nesting(text: bytes) -> int:
    """The nesting depth of arrays and objects in JSON, without recursion.

    Up to the first error in the text, where every parser stops, it finds the same strings as a parser.
    """
    if b"\\" in text:  # pairs of backslashes first: a quote after a single backslash does not end a string
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Remove pairs of quotes without a bracket between them.
    marks = np.frombuffer(text.translate(None, _PLAIN).replace(b'""', b""), np.uint8)
    outside = np.cumsum(marks == ord('"'), dtype=np.uint8) & 1 == 0
    return int(np.cumsum(_DEPTH_CHANGES[marks[outside]], dtype=np.int32).max(initial=0))


def require_distinct(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError if a member occurs more than once, because readers could differ in which one
    they use."""
    value = dict(members)
    if len(value) != len(members):
        counted = collections.Counter(name for name, _ in members)
        raise ValueError(f"the member {counted.most_common(1)[0][0][:80]!r} occurs more than once")
    return value
