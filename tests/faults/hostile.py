"""Checkpoints from an attacker who knows the format and seals forged manifests correctly.

An input of the fuzzer is one line of JSON that lists changes to files, followed by the manifest's body. The body is
text, so that it can contain what no JSON writer produces: repeated members, unlimited nesting, NaN.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import math
import random
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crc32c
import jax
import numpy as np

import jaxckpt
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.stacks import Stack
from jaxckpt._model.zarr import metadata as zarr_json

SEAL = b',"sha256":"'
_TWICE, _NEST, _RAW = "\0twice", "\0nest", "\0raw"  # markers for text that json.dumps cannot write; replaced afterward
_MENDED = "mended"


def sealed(body: bytes) -> bytes:
    """The manifest made from `body`: its JSON up to the seal, without the closing brace."""
    return body + SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}'


def body_of(path: Path) -> dict[str, Any]:
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["sha256"]
    return manifest


def edited(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest, and recompute its seal as docs/format.md specifies."""
    manifest = body_of(path)
    edit(manifest)
    (path / "manifest.json").write_bytes(sealed(text_of(manifest)[:-1]))


def text_of(manifest: Any) -> bytes:
    """JSON text, with the markers replaced."""
    text = json.dumps(manifest, separators=(",", ":"))
    text = text.replace(json.dumps(_TWICE)[1:-1], "")
    while (found := text.find(f'"{json.dumps(_NEST)[1:-1]}')) >= 0:
        end = text.index('"', found + 1)
        levels = int(text[found + 1 + len(json.dumps(_NEST)[1:-1]) : end])
        text = text[:found] + "[" * levels + "]" * levels + text[end + 1 :]
    while (found := text.find(f'"{json.dumps(_RAW)[1:-1]}')) >= 0:
        end = text.index('"', found + 1)
        text = text[:found] + text[found + 1 + len(json.dumps(_RAW)[1:-1]) : end] + text[end + 1 :]
    return text.encode()


def twice(name: str) -> str:
    """A member's name that `text_of` writes as `name`, so that the name occurs twice."""
    return name + _TWICE


def nest(levels: int) -> str:
    """A value that `text_of` writes as this many nested arrays."""
    return f"{_NEST}{levels}"


def raw(text: str) -> str:
    """A value that `text_of` writes as it is, without quotes."""
    return f"{_RAW}{text}"


# Valid objects for any stack record ---------------------------------------------------------------------------


def crc(content: bytes) -> bytes:
    return struct.pack("<I", crc32c.crc32c(content))


def valid_object(stack: Stack) -> tuple[bytes, str]:
    """An object that contains all its chunks, filled with zeros, and its digest."""
    n_bytes = math.prod(stack.chunk_sides) * stack.itemsize
    chunk = bytes(n_bytes) if stack.compression is None else zstd_zeros(n_bytes)
    chunk += crc(chunk)
    count = stack.chunks_per_object
    index = b"".join(struct.pack("<QQ", number * len(chunk), len(chunk)) for number in range(count))
    return chunk * count + index + crc(index), f"{crc32c.crc32c(chunk[-4:] * count):08x}"


def zstd_zeros(n_bytes: int) -> bytes:
    """A zstd frame (RFC 8878) of at most 128 KiB of zeros: one run-length encoded block."""
    return struct.pack("<IBI", 0xFD2FB528, 0xA0, n_bytes) + (n_bytes << 3 | 3).to_bytes(3, "little") + b"\0"


def mend(path: Path, manifest: dict[str, Any]) -> None:
    """Make the other files of a checkpoint match the stacks of a forged manifest, if that takes few bytes."""
    manifest["save_id"] = _MENDED
    for record in manifest["stacks"]:
        with contextlib.suppress(Exception):
            sides = [record["rows"], *record["shape"], *record["chunk"], *record["object"]]
            if not all(type(side) is int for side in sides):
                continue  # Python multiplies a text or list by a huge number: that would exhaust memory in this test
            stack = Stack(
                record["name"],
                record["dtype"],
                tuple(record["shape"]),
                record["rows"],
                tuple(record["chunk"]),
                tuple(record["object"]),
                record.get("compression"),
            )
            text = zarr_json(stack)
            record["sha256"] = hashlib.sha256(text).hexdigest()
            folder = path / f"data-{_MENDED}" / stack.name
            if ".." in stack.name or "/" in stack.name:
                continue
            folder.mkdir(parents=True)
            (folder / "zarr.json").write_bytes(text)
            count = math.prod(-(-n // side) for n, side in zip(stack.array_shape, stack.object_sides, strict=True))
            sizes = (stack.chunk_stored_bytes, math.prod(stack.object_sides) * stack.itemsize, stack.index_bytes)
            if not 0 <= count <= 100 or max(sizes) > 1 << 16:
                continue
            content, digest = valid_object(stack)
            record["objects"] = {}
            for index, _ in stack.objects():
                place = "/".join(map(str, index))
                (folder / "c" / place).parent.mkdir(parents=True, exist_ok=True)
                (folder / "c" / place).write_bytes(content)
                record["objects"][place] = [len(content), digest]


# Mutations ----------------------------------------------------------------------------------------------------

NUMBERS = [-1, 0, 1, 2, 3, 7, 31, 255, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 61, 1 << 62, 1 << 63, 1 << 64, 10**400]
TEXTS = ["", "x", "..", "../x", "/etc", "a/b", "a\0b", "\ud800", "\u202e", "ﬁ", "None", "0x7ff8000000000000",
         "1e999", "x" * 5000, "dict", "namedtuple", "custom", "jax", "key", "bytes", "str", "int", "zstd", "bool",
         "int4", "bfloat16", "complex128", "threefry2x32", "rbg", "0/0/0", "true", "-0.0"]  # fmt: skip
OTHERS = [None, True, False, [], {}, 0.5, -0.0, 1e308, [0], [[]], {"": 0}, nest(100), nest(600), nest(30000),
          raw("NaN"), raw("-Infinity"), raw("1e999"), raw("0.0"), raw("1" * 5000), raw("01"), raw("\x01")]  # fmt: skip


def _places(node: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of every descendant node."""
    items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        found.append((node, key))
        if len(found) < 5000:
            _places(child, found)
    return found


def mutated(case: bytes, draw: random.Random, seeds: list[bytes]) -> bytes:
    """A copy of a case with a few random changes. If it is not valid JSON, a few bytes are changed.

    One third of the results are seeds in which only other files change, because few forged manifests pass the checks
    and get as far as reading those files.
    """
    files_only = draw.random() < 0.33
    if files_only:
        case = draw.choice(seeds)
    head, _, body = case.partition(b"\n")
    try:
        header, manifest = json.loads(head), json.loads(body)
        for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
            if files_only or draw.random() < 0.2:
                _mutate_files(header, draw)
            else:
                _mutate(manifest, draw)
        return json.dumps(header).encode() + b"\n" + text_of(manifest)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        content = bytearray(case)
        for _ in range(draw.choice((1, 1, 2, 5))):
            if content:
                content[draw.randrange(len(content))] = draw.choice(b'{}[]",:\\0 \x00\xff\xed') or draw.randrange(256)
        return bytes(content)


def _mutate_files(header: dict[str, Any], draw: random.Random) -> None:
    if draw.random() < 0.2:
        header["mend"] = not header.get("mend")
    operation = draw.choice(("flip", "cut", "grow", "index", "index", "swap"))
    files = header.setdefault("files", [])
    files.append([draw.randrange(99), operation, draw.randrange(1 << 16), draw.choice(NUMBERS[:-1])])
    del files[:-4]


def _mutate(manifest: Any, draw: random.Random) -> None:
    places = _places(manifest, [])
    # Stacks and the tree are most of the attack surface, but most of the nodes are leaves.
    part = draw.choice(("stacks", "tree", "leaves", "meshes", "layouts", "step", "metadata", None))
    if part is not None and isinstance(manifest, dict) and isinstance(manifest.get(part), (dict, list)):
        places = _places(manifest[part], []) or places
    node, key = draw.choice(places)
    value = node[key]
    match draw.randrange(9):
        case 0:
            node[key] = draw.choice(NUMBERS)
        case 1:
            node[key] = draw.choice(TEXTS)
        case 2:
            node[key] = json.loads(json.dumps(draw.choice(OTHERS)))
        case 3 if isinstance(value, int):
            node[key] = value + draw.choice((-1, 1, 2, value, 1 << 30))
        case 3 | 4:
            other, at = draw.choice(places)
            node[key] = json.loads(json.dumps(other[at]))
        case 5:
            del node[key]
        case 6 if isinstance(node, dict):
            node[twice(key) if draw.random() < 0.5 else draw.choice(TEXTS)] = value
        case 6:
            node[key:key] = [json.loads(json.dumps(value))] * draw.choice((1, 2, 40))
        case 7 if isinstance(value, list):
            draw.shuffle(value)
        case 7:
            node[key] = [value] if draw.random() < 0.5 else {"type": "list", "children": [value]}
        case _:
            if isinstance(value, list):
                del value[draw.randrange(len(value) + 1) :]
            elif isinstance(value, dict) and isinstance(node, dict):
                node[key] = {draw.choice(TEXTS): child for child in value.values()}


# Trying a case ------------------------------------------------------------------------------------------------


class Range:
    """Checkpoints to start from, and a folder in which cases are tried. A case takes about 2 ms on tmpfs."""

    def __init__(self, folder: Path) -> None:
        self._bases: list[Path] = []
        self._originals: list[list[tuple[Path, bytes]]] = []
        self._values: list[tuple[bytes, list[Any]]] = []
        for number, (options, tree) in enumerate(_samples()):
            path = folder / f"base-{number}"
            jaxckpt.save(path, tree, options=options, metadata={"run": [1, "é"]})
            self._bases.append(path)
            files = sorted(file for file in path.glob("data-*/**/*") if file.is_file())
            self._originals.append([(file, file.read_bytes()) for file in files])
            self._values.append((text_of(body_of(path)), _read(path)))
        self._seeds = self.seeds()

    def seeds(self) -> list[bytes]:
        return [
            json.dumps({"base": number, "mend": mended}).encode() + b"\n" + text_of(body_of(path))
            for number, path in enumerate(self._bases)
            for mended in (False, True)
        ]

    def mutated(self, case: bytes, draw: random.Random) -> bytes:
        return mutated(case, draw, self._seeds)

    def attempt(self, case: bytes) -> str:
        """The outcome of reading the case: "right data" or the name of a typed error. Raises on any other outcome."""
        head, _, body = case.partition(b"\n")
        try:
            header = json.loads(head)
            number = int(header["base"]) % len(self._bases)
            damages = [(int(a), str(b), int(c), int(d)) for a, b, c, d in header.get("files", ())]
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            header, number, damages = {}, 0, []
        path = self._bases[number]
        if header.get("mend"):
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError, AttributeError):
                manifest = json.loads(body)
                mend(path, manifest)
                body = text_of(manifest)
        originals = self._originals[number]
        touched = list(_damage(originals, damages))
        (path / "manifest.json").write_bytes(sealed(body[:-1]))
        try:
            found = _read(path)
            saved, values = self._values[number]
            if body == saved and found != values:
                raise AssertionError(f"silent: {found} for {values}")
            return "right data"
        except (jaxckpt.CorruptError, jaxckpt.errors.NotACheckpointError) as error:
            if len(str(error)) > 100_000:
                raise AssertionError("an endless message") from error
            return type(error).__name__
        finally:
            for file, content in touched:
                file.write_bytes(content)
            shutil.rmtree(path / f"data-{_MENDED}", ignore_errors=True)


def _samples() -> Iterator[tuple[jaxckpt.Options, Any]]:
    small = jaxckpt.Options(chunk_bytes=64, object_bytes=256, sync=False)
    pair = collections.namedtuple("pair", "left right")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("a",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    tree = {
        "w": jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), split),
        "layers": [np.full(4, number, np.int16) for number in range(5)],
        "pair": pair(np.arange(7, dtype=DTYPES["bfloat16"]), (True, None)),
        "int4": np.arange(6).astype(DTYPES["int4"]),
        "flags": np.array([True, False]),
        1: {"n": 1 << 70, "f": float("nan"), "s": "é", "b": b"\xff", "c": 1j},
    }
    yield small, {"tree": {str(key): value for key, value in tree.items()}, "odd": {(1, "x"): 2, (2, "y"): 0.5}}
    yield jaxckpt.Options(compression="zstd", chunk_bytes=64, object_bytes=256, sync=False), tree["layers"]
    yield small, {"key": jax.random.key(0), "text": "é" * 5000, "empty": np.empty((0, 3)), "scalar": np.float32(1)}


def _damage(
    originals: list[tuple[Path, bytes]], damages: list[tuple[int, str, int, int]]
) -> Iterator[tuple[Path, bytes]]:
    """Damage files, and yield each one with its original content."""
    for number, operation, place, value in damages:
        file, content = originals[number % len(originals)]
        yield file, content
        made = bytearray(content)
        if operation == "flip":
            made[place % len(made)] ^= 1 << value % 8
        elif operation == "cut":
            del made[place % len(made) :]
        elif operation == "grow":
            made += bytes(place)
        elif operation == "swap":
            made = bytearray(originals[place % len(originals)][1])
        elif operation == "index" and len(made) > 20:
            # Change the last entry of the index. The checksum is right only if the index has one entry.
            at = len(made) - 20 + 8 * (place % 2)
            made[at : at + 8] = struct.pack("<Q", value % (1 << 64))
            made[-4:] = crc(bytes(made[-20:-4]))
        file.write_bytes(made)


class TooSlow(Exception):
    """Reading exceeded the time limit."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TooSlow if the block takes longer. This cannot interrupt a C call that never returns."""

    def late(number: int, frame: Any) -> None:
        raise TooSlow(f"over {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def peak_bytes() -> int:
    """The peak resident memory of this process since the last `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _read(path: Path) -> list[Any]:
    """Read a checkpoint in every way that needs no devices, and check each value's shape and dtype."""
    checkpoint = jaxckpt.open(path)
    repr(checkpoint)
    found = checkpoint.leaves
    with contextlib.suppress(jaxckpt.errors.InputError):  # the mesh may not fit
        checkpoint.plan(mesh={"a": 2, "b": 2}, options=jaxckpt.Options(indivisible="replicate"))
    whole = jaxckpt.load_numpy(path)
    values: list[Any] = []
    for leaf in found.values():
        value = leaf.value
        if isinstance(value, (np.ndarray, np.generic)):
            assert (value.shape, value.dtype) == (leaf.shape, leaf.dtype), (value.shape, leaf.shape)
            value = value.shape, value.dtype, value.tobytes()
        values.append(repr(value))
    assert _count(whole) == len(values)
    return values


def _count(node: Any) -> int:
    """The leaves of a tree. JAX does not sort the keys of a forged dict if they are of several types."""
    if isinstance(node, (dict, list, tuple)):
        return sum(map(_count, node.values() if isinstance(node, dict) else node))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return node is not None
