"""Malicious checkpoints: a typed error within limits of memory and time, or the right data."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hostile import edited, nest, raw, twice
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reliability import Fault

import jaxckpt
from jaxckpt._model import manifest as _manifest
from jaxckpt._model import records as _records
from jaxckpt._model import zarr as _zarr
from jaxckpt._store.folder import Folder

PROMISE = "typed error within limits of memory and time"
GROWTH_BYTES = 64 << 20
GROWTH_FACTOR = 25  # additional bytes per byte of the manifest
SECONDS = 30  # detects hangs; generous, because the machine may be busy


def make() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    return {
        "w": jax.device_put(jnp.arange(1024.0).reshape(32, 32) + 1, NamedSharding(mesh, P("a", "b"))),
        "zeros": jnp.zeros((40, 10)),
        "layers": [jnp.full(64, 1.5 * i) for i in range(5)],
        "n": np.arange(7),
        "key": jax.random.key(0),
        "text": "é" * 5000,
        "int": 1 << 70,
    }


SMALL = jaxckpt.Options(chunk_bytes=256, object_bytes=1024)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "ckpt"
    jaxckpt.save(path, make(), options=SMALL, process_state={"rows": 3}, metadata={"a": 1})
    hostile.edited(path, lambda manifest: None)
    jaxckpt.load_numpy(path)  # sealed again without a change: valid
    return path


def copied(saved: Path, folder: Path, name: str) -> Path:
    path = folder / "".join(letter if letter.isalnum() else "-" for letter in name)
    shutil.copytree(saved, path)
    return path


def readers(path: Path) -> list[Callable[[], Any]]:
    return [
        lambda: jaxckpt.open(path).plan(mesh={"a": 4}),
        lambda: jaxckpt.load_numpy(path),
        lambda: jaxckpt.restore(path),
        lambda: [leaf.value for leaf in jaxckpt.open(path).leaves.values()],
    ]


def require_refusal(fault: Fault, name: str, path: Path, read: Callable[[], Any]) -> None:
    """Check that a forged checkpoint is refused, and count the outcome."""
    manifest = path / "manifest.json"
    max_bytes = GROWTH_BYTES + GROWTH_FACTOR * (manifest.stat().st_size if manifest.is_file() else 0)
    hostile.forget_peak()
    before, begun = hostile.peak_bytes(), time.monotonic()
    try:
        with hostile.at_most(SECONDS):
            read()
    except jaxckpt.CorruptError as error:
        refusal = error
    else:
        fault.silent(f"{name}: read without an error")
        return
    grown = hostile.peak_bytes() - before
    assert grown < max_bytes, f"{name}: took {grown >> 20} MiB and {time.monotonic() - begun:.1f} s"
    assert len(str(refusal)) < 20_000, name
    fault.saw(type(refusal).__name__)


# Manifests ----------------------------------------------------------------------------------------------------


def deep(levels: int) -> Any:
    node: Any = 0
    for _ in range(levels):
        node = {"type": "list", "children": [node]}
    return node


def stack_of(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that returns the stack whose name contains `name`."""
    return lambda manifest: next(stack for stack in manifest["stacks"] if name in stack["name"])


square, vector, first = stack_of("float32-32x32"), stack_of("float32-64"), stack_of("")


def forged(stack: dict[str, Any], **changes: Any) -> None:
    """Change a stack, and make the digest of its zarr.json match."""
    stack.update(changes)
    record = {**stack, "objects": {}}
    made = _manifest.msgspec.convert(record, _records.StackRecord).stack()
    stack["sha256"] = hashlib.sha256(_zarr.metadata(made)).hexdigest()


def tiny_chunks(manifest: dict[str, Any]) -> None:
    """An index of 2^36 entries, in an object whose recorded length is large enough (a sparse file could have it)."""
    stack = stack_of("int64-7")(manifest)
    forged(stack, shape=[1 << 36], chunk=[1, 1], object=[1, 1 << 36])
    stack["objects"] = {"0/0": [1 << 45, "00000000"]}


def zstd_bomb(manifest: dict[str, Any]) -> None:
    """A chunk of 2^40 bytes in an object of 100 bytes."""
    stack = stack_of("int64-7")(manifest)
    forged(stack, shape=[1 << 37], chunk=[1, 1 << 37], object=[1, 1 << 37], compression="zstd")
    stack["objects"] = {"0/0": [100, "00000000"]}


def huge_claim(manifest: dict[str, Any]) -> None:
    """An array of 2^40 bytes in an object of 100 bytes."""
    stack = stack_of("int64-7")(manifest)
    forged(stack, shape=[1 << 37], chunk=[1, 1 << 37], object=[1, 1 << 37])
    stack["objects"] = {"0/0": [100, "00000000"]}


def long_chunk(manifest: dict[str, Any]) -> None:
    """A chunk that extends far beyond the array."""
    stack = stack_of("int64-7")(manifest)
    forged(stack, chunk=[1, 1 << 40], object=[1, 1 << 40])
    stack["objects"] = {"0/0": [(8 << 40) + 24, "00000000"]}


def many_paths(manifest: dict[str, Any]) -> None:
    """A long key above many containers: all their paths together would take 100 GB."""
    manifest["tree"] = {"type": "dict", "keys": ["k" * (1 << 20)], "children": [
        {"type": "list", "children": [{"type": "list", "children": []}] * 100_000}]}  # fmt: skip


def equal_hashes(manifest: dict[str, Any]) -> None:
    """Keys with equal hashes: a dict of them would take minutes to build, more than SECONDS."""
    keys = [{"tuple": [-1 - (number >> bit & 1) for bit in range(16)]} for number in range(1 << 16)]
    manifest["tree"] = {"type": "dict", "keys": keys, "children": [None] * len(keys)}


def many_axes(manifest: dict[str, Any]) -> None:
    manifest["meshes"][0]["axes"] = {str(axis): (1 << 62) - axis for axis in range(100_000)}


def named(*fields: str) -> Any:
    return lambda m: m.update(tree={"type": "namedtuple", "name": "N", "keys": list(fields), "children": [None] * 2})


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    # Types and members
    "another format": lambda m: m.update(format="zarr"),
    "an unknown member": lambda m: m.update(extra=1),
    "a repeated member of the manifest": lambda m: m.update({twice("leaves"): []}),
    "a repeated member of a stack": lambda m: first(m).update({twice("rows"): 1}),
    "a repeated member of a leaf": lambda m: m["leaves"][0].update({twice("path"): m["leaves"][0]["path"]}),
    "a repeated object": lambda m: square(m)["objects"].update({twice("0/0/0"): [36, "00000000"]}),
    "a repeated axis of a mesh": lambda m: m["meshes"][0]["axes"].update({twice("a"): 2}),
    "a repeated member of a container": lambda m: m["tree"].update({twice("type"): "dict"}),
    "a repeated member of the metadata": lambda m: m["metadata"].update({twice("a"): 2}),
    "NaN": lambda m: m.update(metadata=raw("NaN")),
    "Infinity": lambda m: m.update(metadata=[raw("-Infinity")]),
    "a float out of range": lambda m: m.update(metadata=raw("1e999")),
    "an integer of 5,000 digits": lambda m: m.update(metadata=raw("1" * 5000)),
    "rows of 5,000 digits": lambda m: first(m).update(rows=raw("1" * 5000)),
    "rows of 400 digits": lambda m: first(m).update(rows=raw("1" * 400)),
    "a float for an integer": lambda m: first(m).update(rows=raw("1.0")),
    "true for an integer": lambda m: first(m).update(rows=True),
    "a lone surrogate": lambda m: m.update(created="\ud800"),
    "control characters": lambda m: m.update(created=raw('"\x01"')),
    "a negative step": lambda m: m.update(step={"number": -1}),
    "a step beyond 64 bits": lambda m: m.update(step={"number": 1 << 70}),
    # Depth
    "a tree that is too deep": lambda m: m.update(tree=deep(300)),
    "a tree that is far too deep": lambda m: m.update(tree=deep(450)),
    "metadata of 30,000 levels": lambda m: m.update(metadata=nest(30_000)),
    "metadata of a million levels": lambda m: m.update(metadata=nest(1_000_000)),
    "a version of a million levels": lambda m: m.update(version=nest(1_000_000)),
    # Sizes
    "a huge shape": lambda m: square(m).update(shape=[1 << 40, 1 << 40]),
    "a huge shape without elements": lambda m: forged(vector(m), shape=[0, 1 << 62], chunk=[1, 1, 1], object=[1, 1, 1]),
    "a huge claimed array": huge_claim,
    "a zstd bomb": zstd_bomb,
    "an index of 2^36 chunks": tiny_chunks,
    "a chunk beyond the array": long_chunk,
    "a negative shape": lambda m: square(m).update(shape=[-1]),
    "a shape with text": lambda m: square(m).update(shape=["8"]),
    "33 dimensions": lambda m: square(m).update(shape=[1] * 33, chunk=[1] * 34, object=[1] * 34),
    "a million dimensions": lambda m: square(m).update(shape=[1 << 62] * 1_000_000),
    "no rows": lambda m: first(m).update(rows=0),
    "2^60 rows without elements": lambda m: forged(
        vector(m), rows=1 << 60, shape=[0], chunk=[1, 1], object=[1, 1], objects={}
    ),
    "2^62 rows": lambda m: first(m).update(rows=1 << 62),
    "another chunk": lambda m: square(m).update(chunk=[1, 1, 1]),
    "a chunk without elements": lambda m: square(m).update(chunk=[0, 0, 0]),
    "an object without elements": lambda m: square(m).update(object=[0, 0, 0]),
    "an object of 2^62": lambda m: square(m).update(object=[1, 1 << 62, 1 << 62]),
    "missing objects": lambda m: first(m)["objects"].popitem(),
    "an object that is too short": lambda m: square(m)["objects"].update({"0/0/0": [200, "00000000"]}),
    "an empty object": lambda m: square(m)["objects"].update({"0/0/0": [0, ""]}),
    "an object of 2^60 bytes": lambda m: square(m)["objects"].update({"0/0/0": [1 << 60, ""]}),
    # Names
    "an unknown dtype": lambda m: first(m).update(dtype="object"),
    "another dtype": lambda m: first(m).update(dtype="int32"),
    "a codec": lambda m: first(m).update(compression="gzip"),
    "a folder outside": lambda m: first(m).update(name="../../etc"),
    "the parent folder": lambda m: first(m).update(name=".."),
    "an absolute name": lambda m: first(m).update(name="/etc"),
    "a name with NUL": lambda m: first(m).update(name="a\0b"),
    "a repeated name": lambda m: m["stacks"][1].update(name=m["stacks"][0]["name"]),
    "a save id with a parent folder": lambda m: m.update(save_id="../x"),
    "an empty save id": lambda m: m.update(save_id=""),
    "an object outside its stack": lambda m: first(m)["objects"].update({"../0": [1, ""]}),
    "an object elsewhere": lambda m: square(m).update(
        objects={key.replace("0/0/0", "../../0"): value for key, value in square(m)["objects"].items()}
    ),
    # Leaves
    "a row out of range": lambda m: m["leaves"][-1].update(row=99),
    "a stack out of range": lambda m: m["leaves"][-1].update(stack=99),
    "a negative stack": lambda m: m["leaves"][-1].update(stack=-1),
    "a shared row": lambda m: m["leaves"][3].update(row=0),
    "no row": lambda m: m["leaves"][-1].pop("row"),
    "a repeated path": lambda m: m["leaves"][1].update(path=m["leaves"][0]["path"]),
    "a value and a layout": lambda m: next(leaf for leaf in m["leaves"] if "value" in leaf).update(layout=0),
    "another path": lambda m: m["leaves"][0].update(path="elsewhere"),
    "a missing leaf": lambda m: m["leaves"].pop(),
    "an unknown kind": lambda m: m["leaves"][0].update(kind="pickle"),
    "an integer of many digits": lambda m: m["leaves"][0].update(value="9" * 1_000_000),
    "an integer with an underscore": lambda m: m["leaves"][0].update(value="1_0"),
    "a PRNG key of floats": lambda m: m["leaves"][-1].update(kind="key", impl="threefry2x32"),
    "a PRNG key without its implementation": lambda m: m["leaves"][1].pop("impl"),
    # The tree
    "no tree": lambda m: m.update(tree=None),
    "an extra container": lambda m: m.update(tree={"type": "list", "children": [m["tree"]]}),
    "true in the tree": lambda m: m["tree"]["children"].__setitem__(1, True),
    "a negative leaf in the tree": lambda m: m["tree"]["children"].__setitem__(0, -1),
    "a repeated leaf in the tree": lambda m: m["tree"]["children"].__setitem__(0, 1),
    "many paths of one megabyte": many_paths,
    "keys with equal hashes": equal_hashes,
    "a key beyond 64 bits": lambda m: m["tree"]["keys"].__setitem__(0, 1 << 64),
    "fields that Python normalizes to one": named("fi", "ﬁ"),
    "a field that Python normalizes to None": named("Ｎone", "x"),
    "a field with code": named("x=print(1)", "y"),
    "a container that would be imported": lambda m: m.update(tree={"type": "os.system", "keys": [], "children": []}),
    # Layouts
    "a mesh that is too small": lambda m: m["meshes"][0].update(devices=[0]),
    "a mesh of 2^60 devices": lambda m: m["meshes"][0].update(axes={"a": 1 << 30, "b": 1 << 30}),
    "a mesh of 100,000 axes": many_axes,
    "a mesh without devices": lambda m: m["meshes"][0].update(axes={"a": 0, "b": 1}, devices=[]),
    "a repeated device": lambda m: m["meshes"][0].update(devices=[0] * 8),
    "an unknown axis type": lambda m: m["meshes"][0].update(types=["x", "y"]),
    "a layout out of range": lambda m: m["leaves"][-2].update(layout=99),
    "a mesh out of range": lambda m: m["layouts"][0].update(mesh=99),
    "a repeated axis in a spec": lambda m: m["layouts"][-1].update(spec=[["a"], ["a"]]),
    "a spec of a million entries": lambda m: m["layouts"][-1].update(spec=[[]] * 1_000_000),
    "a spec that does not divide": lambda m: first(m).update(shape=[3]),
    # Excessive lengths
    "70 MB": lambda m: m.update(metadata="x" * (70 << 20)),
    "a long member name": lambda m: m.update({"x" * (1 << 20): 0}),
    "20 long names": lambda m: m.update(stacks=[{**first(m), "name": "x" * (1 << 18)}] * 20),
}  # fmt: skip


@pytest.mark.fault(25, "hostile manifests: claims, depth, repeated members, names", PROMISE, quick=len(EDITS))
def test_a_hostile_manifest_is_refused(fault: Fault, saved: Path, tmp_path: Path) -> None:
    for name in fault.rounds(list(EDITS)):
        path = copied(saved, tmp_path, name)
        edited(path, EDITS[name])
        for read in (lambda path=path: jaxckpt.open(path), lambda path=path: jaxckpt.load_numpy(path)):
            with pytest.MonkeyPatch.context() as patch:
                # A manifest must pass all checks before any of its files is opened.
                patch.setattr(Folder, "array_reader", lambda *_, **__: pytest.fail("an array was opened"))
                require_refusal(fault, name, path, read)
        shutil.rmtree(path)


RUBBISH = [b"", b"{", b"\xff", b'"\xed\xa0\x80"', b"[" * 100_000, b'{"version":' * 100_000, b"\0" * 1000, b"null",
           b'{"format":"jaxckpt","version":1,"x":"\xff"}']  # fmt: skip


@pytest.mark.parametrize("content", RUBBISH, ids=range(len(RUBBISH)))
def test_a_file_that_is_not_a_manifest_is_refused(saved: Path, tmp_path: Path, content: bytes) -> None:
    for text in (content, hostile.sealed(content)):
        (tmp_path / "manifest.json").write_bytes(text)
        with pytest.raises(jaxckpt.errors.ManifestError):
            jaxckpt.open(tmp_path)


@pytest.mark.child
def test_depth_is_checked_before_a_parser_recurses(saved: Path, tmp_path: Path) -> None:
    """Training programs may raise Python's recursion limit; a recursive parser would then overflow the stack."""
    path = copied(saved, tmp_path, "deep")
    edited(path, lambda m: m.update(metadata=nest(2_000_000)))
    code = """
import sys, jaxckpt
sys.setrecursionlimit(10**9)
try:
    jaxckpt.open(sys.argv[1])
except jaxckpt.errors.ManifestError as error:
    assert "nested deeper" in str(error), error
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("text", "depth"),
    [(b"1", 0), (b"[]", 1), (b'{"a":[[1]]}', 3), (b'"[[["', 0), (b'["\\"[[["]', 1), (b'["\\\\",[[]]]', 3),
     (b'["\\\\\\"[[["]', 1), (b"[],[],[[]]", 2), (b"]]]][", 0)],
)  # fmt: skip
def test_depth_ignores_brackets_in_strings(text: bytes, depth: int) -> None:
    assert max(0, _manifest.nesting(text)) == depth


def test_a_manifest_in_another_order_is_read(saved: Path, tmp_path: Path) -> None:
    """Canonical bytes are an optimization, not a rule: another writer may choose other orders and escapes."""
    path = copied(saved, tmp_path, "order")
    wanted = jaxckpt.load_numpy(path)
    manifest = hostile.body_of(path)
    body = json.dumps(dict(reversed(manifest.items())), separators=(",", ":"), ensure_ascii=True).encode()
    (path / "manifest.json").write_bytes(hostile.sealed(body[:-1]))
    jax.tree.map(np.testing.assert_array_equal, jaxckpt.load_numpy(path), wanted)


def test_metadata_that_no_reader_accepts_is_not_written(tmp_path: Path) -> None:
    deep: Any = 0
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(jaxckpt.errors.InputError, match="metadata"):
        jaxckpt.save(tmp_path / "deep", {"x": 1}, metadata=deep)
    circular: list[Any] = []
    circular.append(circular)
    with pytest.raises(jaxckpt.errors.InputError, match=r"metadata must be plain JSON: .*[Cc]ircular"):
        jaxckpt.save(tmp_path / "circular", {"x": 1}, metadata=circular)
    with pytest.raises(jaxckpt.errors.InputError, match="bytes long, over"):
        jaxckpt.save(tmp_path / "large", {"x": 1}, metadata="x" * (65 << 20))
    assert not list(tmp_path.glob("*/*"))


def test_a_newer_format_is_reported(saved: Path, tmp_path: Path) -> None:
    path = copied(saved, tmp_path, "newer")
    edited(path, lambda manifest: manifest.update(version=2, novelty=[1]))
    with pytest.raises(jaxckpt.errors.ManifestError, match="Update jaxckpt"):
        jaxckpt.open(path)


STATES = {
    "no object": b"[1]",
    "no text": b"\xff",
    "an unsupported value": b'{"rows":3}',
    "two kinds": b'{"rows":{"json":3,"base64":""}}',
    "no base64": b'{"rows":{"base64":"%%"}}',
    "a repeated name": b'{"rows":{"json":3},"rows":{"json":4}}',
    "depth": b'{"rows":{"json":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    "5,000 digits": b'{"rows":{"json":' + b"1" * 5000 + b"}}",
}


@pytest.mark.fault(25, "hostile process states", PROMISE, quick=len(STATES))
def test_a_hostile_process_state_is_refused(fault: Fault, saved: Path, tmp_path: Path) -> None:
    for name in fault.rounds(list(STATES)):
        path, content = copied(saved, tmp_path, name), STATES[name]
        (file,) = path.glob("data-*/process-0.json")
        file.write_bytes(content)
        entry = [len(content), hashlib.sha256(content).hexdigest()]
        edited(path, lambda manifest, entry=entry: manifest.update(process_states=[entry]))
        require_refusal(fault, name, path, lambda path=path: jaxckpt.open(path).process_states)


# Values -------------------------------------------------------------------------------------------------------


def replaced(path: Path, name: str, content: bytes) -> None:
    """Replace the data in the only object of a stack. All checksums stay valid."""
    (folder,) = path.glob(f"data-*/*{name}")
    file = next(file for file in folder.glob("c/**/*") if file.is_file())
    place = str(file.relative_to(folder / "c"))
    length = file.stat().st_size
    chunk = content + hostile.crc(content)
    index = np.array([0, len(chunk)], "<u8").tobytes()
    made = chunk + index + hostile.crc(index)
    assert len(made) == length, "one chunk"
    file.write_bytes(made)
    digest = f"{int.from_bytes(hostile.crc(chunk[-4:]), 'little'):08x}"
    edited(path, lambda manifest: stack_of(name)(manifest)["objects"].update({place: [length, digest]}))


def test_text_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path, {"text": "x" * 5000})
    replaced(tmp_path, "uint8-5000", b"\xff" * 5000)
    for read in (jaxckpt.load_numpy, jaxckpt.restore):
        with pytest.raises(jaxckpt.errors.DataError, match=r"'text'.*UTF-8"):
            read(tmp_path)


def test_a_bool_of_two_is_an_error(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path, {"flags": np.array([True, False, True])})
    replaced(tmp_path, "bool-3", bytes([0, 1, 2]))
    with pytest.raises(jaxckpt.errors.DataError, match=r"'flags'.* neither true nor false"):
        jaxckpt.load_numpy(tmp_path)


def test_bits_beyond_a_narrow_type_do_no_harm(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path, {"x": np.arange(3).astype("int4")})
    replaced(tmp_path, "int4-3", bytes([0xF1, 0x7F, 0x80]))
    assert jaxckpt.load_numpy(tmp_path)["x"].astype(np.int8).tolist() == [1, -1, 0]


@pytest.mark.parametrize("impl", ["rbg", "no such", "x" * 300])
def test_a_key_of_another_implementation_is_an_error(saved: Path, tmp_path: Path, impl: str) -> None:
    path = copied(saved, tmp_path, "key")
    edited(path, lambda m: next(leaf for leaf in m["leaves"] if "impl" in leaf).update(impl=impl))
    with pytest.raises((jaxckpt.CorruptError, jaxckpt.MismatchError), match="PRNG"):
        jaxckpt.restore(path)


def test_thousands_of_missing_objects_are_reported_quickly(tmp_path: Path) -> None:
    """The time to name the affected leaves must not grow as objects × leaves."""
    tree = {str(number): np.zeros(256, np.float32) for number in range(500)}
    jaxckpt.save(tmp_path, tree, options=jaxckpt.Options(chunk_bytes=256, object_bytes=256, sync=False))
    for folder in tmp_path.glob("data-*/*/c"):
        shutil.rmtree(folder)
    with (
        hostile.at_most(SECONDS),
        pytest.raises(jaxckpt.errors.DataError, match=r"'0', '1', '10' and 497 more: .* is missing"),
    ):
        jaxckpt.load_numpy(tmp_path)


# Files --------------------------------------------------------------------------------------------------------


def to_link(path: Path) -> None:
    elsewhere = path.with_name(f"{path.name}-elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def to_long_link(path: Path) -> None:
    """Replace a file by a link whose target path is as long as the file was."""
    length = path.stat().st_size
    target = "/" * (length - len("dev/zero")) + "dev/zero"
    path.unlink()
    path.symlink_to(target)


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def to_socket(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has at most 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


KINDS = (to_link, to_long_link, to_pipe, to_device, to_socket, to_folder, to_loop)
FILES = ("manifest.json", "data-*/process-0.json", "data-*/*float32-32x32/zarr.json", "data-*/*float32-32x32/c/0/0/0")
FOLDERS = ("data-*", "data-*/*float32-32x32", "data-*/*float32-32x32/c", "data-*/*float32-32x32/c/0/0")


@pytest.mark.fault(25, "links, pipes, devices, sockets, folders in the place of files", PROMISE, quick=40)
def test_only_plain_files_are_read(fault: Fault, saved: Path, tmp_path: Path) -> None:
    cases = [(file, change) for file in FILES for change in KINDS] + [(folder, to_link) for folder in FOLDERS]
    for pattern, change in fault.rounds(cases):
        name = f"{pattern} {change.__name__}"
        path = copied(saved, tmp_path, name)
        (victim,) = path.glob(pattern)
        if change is to_long_link and victim.stat().st_size > 4000:
            shutil.rmtree(path)
            continue
        change(victim)
        read: list[Callable[[], Any]] = readers(path)[1:]
        if "process" in pattern:
            read = [lambda path=path: jaxckpt.open(path).process_states]
        for reading in read:
            require_refusal(fault, name, path, reading)
        shutil.rmtree(path)


def test_a_checkpoint_may_itself_be_reached_by_a_link(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(saved)
    np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "latest")["n"], np.arange(7))


# Fuzzing ------------------------------------------------------------------------------------------------------


@pytest.mark.child
@pytest.mark.fault(25, "forged inputs of a fuzzer (tests/faults/fuzz.py)", PROMISE, quick=1, full=1)
def test_no_forged_input_does_harm(fault: Fault, tmp_path: Path) -> None:
    seconds = float(os.environ.get("JAXCKPT_FUZZ_SECONDS", "600")) if fault.campaign else 6
    log = tmp_path / "log"
    # Each input writes files, so use tmpfs if it is available.
    memory = Path("/dev/shm")
    folder = memory / f"jaxckpt-fuzz-{os.getpid()}" if os.access(memory, os.W_OK) else tmp_path / "fuzz"
    folder.mkdir()
    program = Path(__file__).with_name("fuzz.py")
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                [sys.executable, program, folder, str(seconds), str(fault.seed or 1)],
                stdout=output, stderr=output, timeout=seconds + 200, check=False, cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(program.parents[2])},
            )  # fmt: skip
        found = json.loads((folder / "outcomes.json").read_text())
        crashes = {file.stem: file.with_suffix(".txt").read_text() for file in folder.glob("crash-*.txt")}
        kept = Path(__file__).with_name("crashes")
        for name in crashes:  # keep the inputs, so that they can be analyzed and turned into tests
            kept.mkdir(exist_ok=True)
            shutil.copy(folder / name, kept / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, log.read_text(errors="replace")[-3000:]
    outcomes = collections.Counter[str](found["outcomes"])
    assert not crashes, "\n".join(f"{kept / name}:\n{text[-1500:]}" for name, text in list(crashes.items())[:3])
    for outcome, count in outcomes.items():
        fault.outcomes[outcome] += count
    assert sum(outcomes.values()) > 10  # a low bound, because the machine may be busy
    print(f"{sum(outcomes.values())} inputs, {found['peak_bytes'] >> 20} MiB, guided: {found['guided']}")
