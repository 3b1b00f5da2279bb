"""docs/format.md is correct: its reader reads every kind of leaf, and jaxckpt reads files written from its text."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import pickle
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

FORMAT_PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
SAVE_BLOCK, READER_BLOCK, TREE_BLOCK = re.findall(r"^```python\n(.*?)^```$", FORMAT_PAGE, re.DOTALL | re.MULTILINE)
EXAMPLE = json.loads(re.findall(r"^```json\n(.*?)^```$", FORMAT_PAGE, re.DOTALL | re.MULTILINE)[0])

# The definitions of the page's reader, without the lines that apply them to the example.
READER = READER_BLOCK[: READER_BLOCK.index('manifest = read_manifest("example")')]
TREE_BUILDER = TREE_BLOCK[: TREE_BLOCK.index("values = [")]

CHILD = f"""
import pickle, sys
sys.modules["jaxckpt"] = sys.modules["tensorstore"] = sys.modules["jax"] = None  # importing them raises
{READER}
for source in sys.argv[1:]:
    manifest = read_manifest(source)
    leaves = {{leaf["path"]: read_leaf(source, manifest, leaf) for leaf in manifest["leaves"]}}
    pickle.dump(leaves, open(source + ".pickle", "wb"))
"""

OPTIONS = {
    "default": jaxckpt.Options(),
    "zstd": jaxckpt.Options(compression="zstd"),
    "blosc": jaxckpt.Options(compression="blosc"),
    "small": jaxckpt.Options(object_bytes=4000, chunk_bytes=700),
    "tiny_zstd": jaxckpt.Options(object_bytes=1000, chunk_bytes=100, compression="zstd"),
    "tiny_blosc": jaxckpt.Options(object_bytes=1000, chunk_bytes=100, compression="blosc"),
}


@pytest.fixture(scope="module")
def read_with_zarr(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Every leaf that the page's reader reads, for each of the options and for eight devices. The reader's process can
    import neither jaxckpt nor tensorstore."""
    folder = tmp_path_factory.mktemp("published")
    for name, options in OPTIONS.items():
        jaxckpt.save(folder / name, tree_of_all_kinds(), options=options)
    info = jaxckpt.save(folder / "eight devices", leaf_of_eight_devices(), options=jaxckpt.Options(sync=False))
    assert info.files == 8 + 3
    names = [*OPTIONS, "eight devices"]
    subprocess.run([sys.executable, "-c", CHILD, *(str(folder / name) for name in names)], check=True, timeout=120)
    return lambda name: pickle.loads((folder / f"{name}.pickle").read_bytes())


def require_same_bits(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def tree_of_all_kinds() -> dict[str, Any]:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    rng = np.random.default_rng(7)

    def on_mesh(value: Any, *spec: str | None) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, P(*spec)))

    return {
        "sharded": on_mesh(rng.standard_normal((48, 64), np.float32), "data", "model"),
        "columns": on_mesh(rng.standard_normal((48, 64), np.float32), None, "model"),
        "bfloat16": on_mesh(jnp.asarray(rng.standard_normal((8, 12)), jnp.bfloat16), "data", "model"),
        "packed": [rng.standard_normal((16, 24), np.float32) for _ in range(11)],
        "scalars": [np.float32(number) for number in range(5)],
        "device_scalar": jnp.int32(-3),
        "bool": on_mesh(np.arange(16).reshape(4, 4) % 3 == 0, "data"),
        "complex64": on_mesh((np.arange(8) - 2j).astype(np.complex64), "model"),
        "complex128": np.array([[1 + 2j, complex("nan")]]),
        "int4": jnp.asarray([-8, -1, 0, 7], jnp.int4),
        "float8": np.array([0.5, -448.0, 1.0], ml_dtypes.float8_e4m3fn),
        "big_endian": np.arange(6, dtype=">i4"),
        "empty": np.zeros((0, 3), np.float16),
        "0-d": np.array(2.5),
        "long": "é" * 5000,
        "step": 3,
    }


def leaf_of_eight_devices() -> dict[str, Any]:
    """Pieces too large for packing, so each device writes its own object."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    host = np.arange(8 * 1024 * 1100, dtype=np.float32).reshape(8 * 1024, 1100)
    return {"w": jax.device_put(host, NamedSharding(mesh, P("data", "model")))}


@pytest.mark.child
@pytest.mark.parametrize("name", OPTIONS)
def test_the_reader_of_the_page_reads_every_kind_of_leaf(
    name: str, read_with_zarr: Callable[[str], dict[str, Any]]
) -> None:
    tree = tree_of_all_kinds()
    found = read_with_zarr(name)
    assert found.pop("step") == "3"
    assert found.pop("long").tobytes().decode() == tree.pop("long")
    tree["big_endian"] = tree["big_endian"].astype("<i4")
    for path in list(found):
        key, _, place = path.partition("/")
        require_same_bits(found.pop(path), tree[key][int(place)] if place else tree[key])
    assert not found


@pytest.mark.child
def test_a_leaf_that_eight_devices_wrote_is_one_array(read_with_zarr: Callable[[str], dict[str, Any]]) -> None:
    require_same_bits(read_with_zarr("eight devices")["w"], leaf_of_eight_devices()["w"])


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    """The functions of the page's reader."""
    names: dict[str, Any] = {}
    exec(READER + TREE_BUILDER, names)
    return names


def read_tree(reader: dict[str, Any], path: Path) -> Any:
    manifest = reader["read_manifest"](path)
    values = [reader["value_of"](leaf, reader["read_leaf"](path, manifest, leaf)) for leaf in manifest["leaves"]]
    return reader["build"](manifest["tree"], values)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_the_reader_of_the_page_builds_the_tree(tmp_path: Path, reader: dict[str, Any]) -> None:
    tree: dict[str, Any] = {
        "values": {1: [3, -(2**70), 0.1, complex(-0.0, 2), True, "é", b"\xff\x00"]},
        "long": {2.5: ("long" * 2000, b"\x01" * 5000, "\ud800")},
        "containers": {False: {"keys": {b"ab": {}}, "none": None, "list": [], "tuple": ()}},
        "arrays": {(1, ("x", b"y")): Pair(np.arange(3), np.float32(2))},
    }
    jaxckpt.save(tmp_path, tree, options=jaxckpt.Options(sync=False))
    found = read_tree(reader, tmp_path)
    pair = found["arrays"].pop((1, ("x", b"y")))
    assert (pair["left"].tolist(), pair["right"]) == ([0, 1, 2], 2)
    tree["arrays"] = {}
    assert found == tree
    assert repr(found["values"]) == repr(tree["values"])


def test_the_reader_of_the_page_builds_keys_and_nans(tmp_path: Path, reader: dict[str, Any]) -> None:
    (payload,) = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))
    key = jax.random.key(3)
    jaxckpt.save(tmp_path, (key, payload), options=jaxckpt.Options(sync=False))
    words, nan = read_tree(reader, tmp_path)
    require_same_bits(words, jax.random.key_data(key))
    assert struct.pack(">d", nan).hex() == "7ff8000000000001"


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_the_reader_of_the_page_reports_a_damaged_object(tmp_path: Path, damage: str, reader: dict[str, Any]) -> None:
    rows = [np.full((64, 64), number + 1, np.float32) for number in range(6)]
    jaxckpt.save(tmp_path, rows, options=jaxckpt.Options(object_bytes=3 * 16384, chunk_bytes=16384, sync=False))
    manifest = reader["read_manifest"](tmp_path)
    first, *_, last = manifest["leaves"]
    (victim,) = tmp_path.glob("data-*/*/c/1/0/0")
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-10])
    with pytest.raises(FileNotFoundError if damage == "missing" else ValueError):
        reader["read_leaf"](tmp_path, manifest, last)
    require_same_bits(reader["read_leaf"](tmp_path, manifest, first), rows[0])


# Seal and digests by hand ---------------------------------------------------------------------------------


def crc32c(content: bytes) -> int:
    """Castagnoli's CRC, bit by bit: x^32 + x^28 + x^27 + x^26 + x^25 + … in its reflected form 0x82F63B78."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_has_the_check_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of RFC 3720's CRC


def object_parts(stack: dict[str, Any], content: bytes) -> Iterator[tuple[bytes, int] | None]:
    """(content, checksum) of each chunk place of an object, None where it is absent; the index is checked."""
    count = math.prod(o // c for o, c in zip(stack["object"], stack["chunk"], strict=True))
    index, checksum = content[-16 * count - 4 : -4], content[-4:]
    assert struct.pack("<I", crc32c(index)) == checksum
    for offset, length in struct.iter_unpack("<QQ", index):
        if (offset, length) == (2**64 - 1, 2**64 - 1):
            yield None
        else:
            chunk = content[offset : offset + length]
            yield chunk[:-4], struct.unpack("<I", chunk[-4:])[0]


def require_object(stack: dict[str, Any], length: int, digest: str, content: bytes) -> int:
    """Check an object as the page specifies; returns the number of absent chunks."""
    assert len(content) == length
    parts = list(object_parts(stack, content))
    present = [part for part in parts if part is not None]
    for chunk, checksum in present:
        assert crc32c(chunk) == checksum
    assert f"{crc32c(b''.join(struct.pack('<I', checksum) for _, checksum in present)):08x}" == digest
    return len(parts) - len(present)


def require_seal(content: bytes) -> None:
    body, seal, end = content.rpartition(b',"sha256":"')
    assert seal
    assert end == hashlib.sha256(body).hexdigest().encode() + b'"}'


def zarr_json(stack: dict[str, Any]) -> bytes:
    """The page's text for zarr.json, with the members that vary filled in."""
    template = re.search(r'^    (\{"zarr_format".*?\})\n\n', FORMAT_PAGE, re.MULTILINE | re.DOTALL)
    assert template is not None
    record = json.loads(template.group(1))
    dtype = stack["dtype"]
    core = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
    held = dtype if dtype in core else "uint16" if dtype == "bfloat16" else "uint8"
    codec = record["codecs"][0]["configuration"]
    record["shape"] = [stack["rows"], *stack["shape"]]
    record["data_type"] = held
    record["chunk_grid"]["configuration"]["chunk_shape"] = stack["object"]
    codec["chunk_shape"] = stack["chunk"]
    if held in ("bool", "int8", "uint8"):
        codec["codecs"][0] = {"name": "bytes"}
    if stack.get("compression") == "zstd":
        codec["codecs"].insert(1, {"name": "zstd", "configuration": {"level": 3, "checksum": False}})
    elif stack.get("compression") == "blosc":
        text = re.search(r'`(\{"name": "blosc".*?\}\})`', FORMAT_PAGE)
        assert text is not None
        blosc = json.loads(text.group(1))
        size = np.dtype(held).itemsize
        blosc["configuration"] |= {"typesize": size, "shuffle": "noshuffle" if size == 1 else "bitshuffle"}
        codec["codecs"].insert(1, blosc)
    record["fill_value"] = (
        False if held == "bool" else 0.0 if held.startswith("float") else [0.0, 0.0] if "complex" in held else 0
    )
    record["attributes"]["jaxckpt"]["dtype"] = dtype
    return json.dumps(record).encode()


@pytest.mark.parametrize("compression", [None, "zstd", "blosc"])
def test_seal_digests_and_zarr_json_match_the_page(tmp_path: Path, compression: Any) -> None:
    # Five rows of one chunk each, three per object, so the second object's third chunk is outside the array.
    rows = [np.full((64, 64), number, np.float32) for number in range(5)]
    tree = {**tree_of_all_kinds(), "rows": rows}
    options = jaxckpt.Options(object_bytes=3 * 16384, chunk_bytes=16384, compression=compression)
    jaxckpt.save(tmp_path, tree, options=options)
    content = (tmp_path / "manifest.json").read_bytes()
    require_seal(content)
    manifest = json.loads(content)
    assert list(manifest)[-1] == "sha256"
    absent = 0
    for stack in manifest["stacks"]:
        folder = tmp_path / f"data-{manifest['save_id']}" / stack["name"]
        metadata = (folder / "zarr.json").read_bytes()
        assert metadata == zarr_json(stack)
        assert hashlib.sha256(metadata).hexdigest() == stack["sha256"]
        sides = zip([stack["rows"], *stack["shape"]], stack["object"], strict=True)
        places = {"/".join(map(str, place)) for place in itertools.product(*(range(-(-n // o)) for n, o in sides))}
        assert set(stack["objects"]) == places
        found = {str(file.relative_to(folder / "c")) for file in folder.glob("c/**/*") if file.is_file()}
        assert found == places
        for place, (length, digest) in stack["objects"].items():
            absent += require_object(stack, length, digest, (folder / "c" / place).read_bytes())
    assert absent, "no object of this test exceeds its array by a whole chunk"


# The worked example ---------------------------------------------------------------------------------------


def fields(value: Any) -> Any:
    """A manifest without its values: the names and types of all members."""
    if isinstance(value, dict):
        return {name: fields(found) for name, found in value.items()}
    return [fields(found) for found in value] if isinstance(value, list) else type(value).__name__


def test_the_worked_example_matches_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(SAVE_BLOCK, "docs/format.md", "exec"), {"__name__": "docs"})
    fresh = json.loads(Path("example/manifest.json").read_bytes())
    assert list(fresh) == list(EXAMPLE)
    assert fields(fresh) == fields(EXAMPLE)
    for changing in ("save_id", "created", "libraries", "phase_seconds", "processes", "sha256"):
        fresh[changing] = EXAMPLE[changing]
    if jax.__version_info__ < (0, 9):  # whose make_mesh makes axes of the type Auto
        fresh["meshes"] = EXAMPLE["meshes"]
    assert fresh == EXAMPLE
    written = sorted(str(file) for file in Path("example").glob("**/*") if file.is_file())
    named = re.findall(r"^    (example/\S+)$", FORMAT_PAGE, re.MULTILINE)
    assert [re.sub("data-[0-9a-f]+", "data", file) for file in written] == sorted(
        re.sub("data-[0-9a-f]+", "data", file) for file in named
    )


def test_the_worked_example_has_a_valid_seal() -> None:
    require_seal(json.dumps(EXAMPLE, separators=(",", ":")).encode())


# A writer that follows the page ---------------------------------------------------------------------------


def write_by_hand(path: Path, dtype: str, rows: np.ndarray[Any, Any], **changes: Any) -> None:
    """A checkpoint with the rows of one stack, an object and a chunk for each row, and a few values."""
    stack: dict[str, Any] = {
        "name": "the-weights",
        "dtype": dtype,
        "shape": list(rows.shape[1:]),
        "rows": len(rows),
        "chunk": [1, *rows.shape[1:]],
        "object": [1, *rows.shape[1:]],
        "sha256": "",
        "objects": {},
    }
    metadata = zarr_json(stack)
    stack["sha256"] = hashlib.sha256(metadata).hexdigest()
    folder = path / "data-by-hand" / stack["name"]
    folder.mkdir(parents=True)
    (folder / "zarr.json").write_bytes(metadata)
    for number, row in enumerate(rows):
        place = "/".join([str(number), *("0" for _ in row.shape)])
        checksum = struct.pack("<I", crc32c(row.tobytes()))
        index = struct.pack("<QQ", 0, row.nbytes + 4)
        content = row.tobytes() + checksum + index + struct.pack("<I", crc32c(index))
        (folder / "c" / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / "c" / place).write_bytes(content)
        stack["objects"][place] = [len(content), f"{crc32c(checksum):08x}"]
    layers = [{"path": f"layers/{number}", "kind": "jax", "stack": 0, "row": number} for number in range(len(rows))]
    values = [
        ("a~1b~0c", "int", "-0x10000000000000000"),
        ("nan", "float", "0x7ff8000000000001"),
        ("rate", "complex", "0.1 -0.0"),
        ("text", "str", "é\n"),
        ("raw", "bytes", base64.b64encode(b"\xff\x00").decode()),
        ("yes", "bool", "true"),
    ]
    manifest = {
        "format": "jaxckpt",
        "version": 1,
        "save_id": "by-hand",
        "created": "",
        "libraries": {},
        "metadata": None,
        "tree": {
            "type": "dict",
            "keys": ["layers", "a/b~c", "nan", "rate", "text", "raw", "yes", "none"],
            "children": [
                {"type": "tuple", "children": list(range(len(rows)))},
                *range(len(rows), len(rows) + len(values)),
                None,
            ],
        },
        "leaves": layers + [{"path": path, "kind": kind, "value": text} for path, kind, text in values],
        "meshes": [],
        "layouts": [],
        "stacks": [stack],
        **changes,
    }
    body = json.dumps(manifest, separators=(",", ":")).encode()[:-1]
    (path / "manifest.json").write_bytes(body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}')


def test_a_checkpoint_written_from_the_page_is_read(tmp_path: Path) -> None:
    bits = np.arange(2 * 3 * 4, dtype="<u2").reshape(2, 3, 4) + 0x3F80
    write_by_hand(tmp_path, "bfloat16", bits)
    tree = jaxckpt.load_numpy(tmp_path)
    for found, row in zip(tree["layers"], bits, strict=True):
        require_same_bits(found, row.view(ml_dtypes.bfloat16))
    assert isinstance(tree["layers"], tuple)
    assert tree["a/b~c"] == -(2**64)
    assert struct.pack(">d", tree["nan"]).hex() == "7ff8000000000001"
    assert (repr(tree["rate"]), tree["text"], tree["raw"]) == ("(0.1-0j)", "é\n", b"\xff\x00")
    assert tree["yes"] is True
    assert tree["none"] is None
    on_device = jaxckpt.restore(tmp_path, mesh=jax.make_mesh((8,), ("data",)))
    assert isinstance(on_device["layers"][1], jax.Array)
    require_same_bits(on_device["layers"][1], bits[1].view(ml_dtypes.bfloat16))


def test_a_newer_version_is_reported_even_without_a_seal(tmp_path: Path) -> None:
    write_by_hand(tmp_path, "uint16", np.zeros((1, 2), "<u2"), version=2)
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"nan"', b'"new"'))
    with pytest.raises(jaxckpt.errors.ManifestError, match="version 2"):
        jaxckpt.open(tmp_path)


def test_an_unknown_member_is_refused(tmp_path: Path) -> None:
    write_by_hand(tmp_path, "uint16", np.zeros((1, 2), "<u2"), extension={})
    with pytest.raises(jaxckpt.errors.ManifestError, match="extension"):
        jaxckpt.open(tmp_path)


# Phases of the save ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"phase_seconds": {}},
        {"phase_seconds": {"write": [], "sync": []}},
        {"phase_seconds": {"write": [1, 2.5], "</script>": [0, 1e12]}},
        {"processes": [["</script>", 4], ["\x1b[2J", 1 << 62]]},
    ],
)
def test_phases_are_optional_and_defined_by_the_writer(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_by_hand(tmp_path, "uint16", np.zeros((1, 2), "<u2"), **changes)
    require_same_bits(jaxckpt.load_numpy(tmp_path)["layers"][0], np.zeros(2, np.uint16))
    page = jaxckpt.report(tmp_path)
    assert ("by process and phase" in page) == bool(any(changes.get("phase_seconds", {}).values()))
    assert "&lt;/script&gt;" in page or "</script>" not in changes.get("phase_seconds", {})


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ({"write": [1.0, 2.0], "sync": [1.0]}, "different numbers of processes for its phases"),
        ({"write": [-1.0]}, "phase_seconds"),
        ({"write": [1e300]}, "phase_seconds"),
        ({"write": ["1"]}, "phase_seconds"),
        ({"write": 1.0}, "phase_seconds"),
        ([1.0], "phase_seconds"),
        (None, "phase_seconds"),
    ],
)
def test_invalid_phases_are_refused(tmp_path: Path, phases: Any, message: str) -> None:
    write_by_hand(tmp_path, "uint16", np.zeros((1, 2), "<u2"), phase_seconds=phases)
    with pytest.raises(jaxckpt.errors.ManifestError, match=message):
        jaxckpt.open(tmp_path)
