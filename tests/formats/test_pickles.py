"""The interpreter of pickles restores data, runs no code, and no file makes it hang or exhaust memory."""

from __future__ import annotations

import collections
import os
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given

import jaxckpt
from jaxckpt._formats import pickles
from jaxckpt._formats.byte_reader import MIN_LOCATED_BYTES
from jaxckpt._formats.pickle_machine import OpaqueObject
from jaxckpt._formats.pickles import as_tree, unpickle
from jaxckpt._formats.shards import FileData
from jaxckpt._sources.foreign import ForeignArray
from jaxckpt.errors import DataError


def read(folder: Path, data: bytes, start: int = 0) -> Any:
    path = folder / "x.pkl"
    path.write_bytes(b"?" * start + data)
    return as_tree(unpickle(str(path), start), "x.pkl")


def array_of(found: ForeignArray) -> np.ndarray:
    target = np.empty(found.shape, found.dtype)
    found.data.read(tuple((0, side) for side in found.shape), target)
    return target


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.text(st.characters(codec="utf-8"))
DATA = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=5)
        | st.dictionaries(KEYS, inner, max_size=5).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@given(DATA, st.integers(0, 5), st.integers(0, 3))
def test_data_comes_back(tmp_path_factory, data: Any, protocol: int, start: int) -> None:
    found = read(tmp_path_factory.getbasetemp(), pickle.dumps(data, protocol), start)
    assert found == data
    assert repr(found) == repr(data)  # compares types too


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex64", "bfloat16", "float8_e4m3fn"])
def test_numpy_arrays_are_located_in_the_file(tmp_path: Path, protocol: int, dtype: str) -> None:
    small = np.arange(6).reshape(2, 3).astype(dtype)
    large = np.arange(MIN_LOCATED_BYTES).reshape(2, -1).astype(dtype)
    tree = {"small": small, "large": large, "fortran": np.asfortranarray(large), "empty": small[:0], "one": small[0, 0]}
    found = read(tmp_path, pickle.dumps(tree, protocol), start=5)
    for name, array in tree.items():
        assert array_of(found[name]).tobytes() == array.tobytes(), name
    assert found["one"].kind == "numpy_scalar"
    assert isinstance(found["large"].data, FileData) == (protocol > 2)  # earlier protocols write bytes as text


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">u2"])
def test_big_endian_arrays_are_swapped(tmp_path: Path, protocol: int, dtype: str) -> None:
    tree = {"a": np.arange(6).reshape(2, 3).astype(dtype), "f": np.asfortranarray(np.ones((9000, 2), dtype))}
    tree["one"] = tree["a"][1, 2]
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(tree, protocol))
    found = jaxckpt.load_numpy(tmp_path / "x.pkl")
    for name, array in tree.items():
        np.testing.assert_array_equal(found[name], array.astype(array.dtype.newbyteorder("=")), strict=True)


def test_large_bytes_are_not_read(tmp_path: Path) -> None:
    (found,) = read(tmp_path, pickle.dumps([b"x" * MIN_LOCATED_BYTES]))
    assert (found.kind, array_of(found).tobytes()) == ("bytes", b"x" * MIN_LOCATED_BYTES)


# Hostile --------------------------------------------------------------------------------------------------


class Runs:
    """An object whose pickle calls a given function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_called(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "run"
    calls = {
        "posix.system": Runs(os.system, f"touch {mark}"),
        "builtins.eval": Runs(eval, f"open({str(mark)!r}, 'w')"),
        "builtins.getattr": Runs(getattr, Runs(getattr, "", "join"), "__class__"),
        "builtins.exec": Runs(exec, "raise SystemExit"),
    }
    found = read(tmp_path, pickle.dumps({**calls, "data": 7}, protocol))
    assert found["data"] == 7
    assert not mark.exists()
    for name in calls:
        with pytest.raises(DataError, match=name):
            array_of(found[name])


def test_a_name_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "hostile_module.py").write_text("raise SystemExit")
    found = read(tmp_path, b"chostile_module\nname\n.")
    with pytest.raises(DataError, match=r"hostile_module\.name"):
        array_of(found)


LAUGHS = b"]q\x00" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(200))
TUPLES = (
    b")q\x000"
    + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) + b"0" for n in range(200))
    + b"h\xc8"
)
MEGABYTE = b"X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(LAUGHS + b".", "more than", id="200 lists, each with the previous one twice"),
        pytest.param(TUPLES + b".", "more than", id="200 tuples, each with the previous one twice"),
        pytest.param(b"]q\x00h\x00h\x00\x86e.", "damaged", id="appends without a mark"),
        pytest.param(b"]q\x00(h\x00h\x00e.", "nested deeper", id="a list that contains itself twice"),
        pytest.param(b"]" * 100_000 + b"a" * 99_999 + b".", "nested deeper", id="deep lists"),
        pytest.param(b"N" + b"\x85" * 100_000 + b".", "nested deeper", id="deep tuples"),
        pytest.param(b"(" * 100_000 + b"t" * 99_999 + b".", "nested deeper", id="marks"),
        pytest.param(
            b"c_codecs\nencode\nq\x00" + MEGABYTE + b"q\x01X\x06\x00\x00\x00latin1q\x020"
            b"0" + b"h\x00h\x01h\x02\x86R" * 100_000 + b".",
            "copy far more",
            id="many copies of one megabyte",
        ),
        pytest.param(b"\x8d" + struct.pack("<Q", 1 << 62) + b"x.", "ends in the middle of", id="text of 4 exabytes"),
        pytest.param(b"\x8e" + struct.pack("<Q", 1 << 62) + b"x.", "ends in the middle of", id="bytes of 4 exabytes"),
        pytest.param(b"\x8b" + struct.pack("<I", 1 << 31) + b"x.", "ends in the middle of", id="an integer of 2 GiB"),
        pytest.param(b"L" + b"9" * 100_000 + b"L\n.", "damaged", id="decimals that take quadratic time"),
        pytest.param(b"h\x07.", "memo or mark that does not exist", id="an empty memo"),
        pytest.param(b".", "memo or mark that does not exist", id="an empty stack"),
        pytest.param(b"N", "ends", id="no end"),
        pytest.param(b"", "ends", id="nothing"),
        pytest.param(b"\xffN.", "does not build data", id="no operation"),
        pytest.param(b"\x82\x01.", "does not build data", id="the extension registry"),
        pytest.param(b"\x97.", "does not build data", id="an out-of-band buffer"),
        pytest.param(b"Nbaz.", "damaged", id="items of None"),
        pytest.param(b"K\x01Q.", "external object", id="a persistent id"),
        pytest.param(b"(NNNd.", "no value", id="a key alone"),
        pytest.param(b"NN\x93.", "is not text", id="a name of None"),
        pytest.param(b"N)R.", "is called", id="a call of None"),
    ],
)
def test_hostile_pickles_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str
) -> None:
    # A real file may have four million values, which take seconds.
    monkeypatch.setattr(pickles, "MAX_VALUES", 1 << 16)
    with pytest.raises(DataError, match=message):
        read(tmp_path, data)


def test_keys_that_are_slow_to_hash_are_not_hashed(tmp_path: Path) -> None:
    """The hash of 200 nested pairs takes 2^200 steps; 200,000 integers of one hash take 2 * 10^10 comparisons."""
    assert "type tuple" in read(tmp_path, b"}" + TUPLES + b"Ns.").data.reason
    modulus = (1 << 61) - 1
    found = read(tmp_path, pickle.dumps(list({n * modulus: 0 for n in range(9)}) * 2))
    assert len(found) == 18
    items = b"".join(pickle.dumps(n * modulus, 2)[2:-1] + b"N" for n in range(200_000))
    assert "type int" in read(tmp_path, b"}(" + items + b"u.").data.reason


REAL = pickle.dumps(
    {
        "a": [1, 2.5, "x", b"y", None, True, (1, 2)],
        "b": collections.OrderedDict(x=np.arange(5.0)),
        "c": Runs(os.getpid),
        "d": 1 << 100,
        "e": np.float32(2),
    },
    4,
)


def test_every_prefix_is_reported(tmp_path: Path) -> None:
    for length in range(len(REAL)):
        with pytest.raises(DataError):
            read(tmp_path, REAL[:length])


@pytest.mark.parametrize("seed", range(20))
def test_altered_bytes_raise_only_our_errors(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    message = 0
    for _ in range(100):
        data = bytearray(REAL)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            read(tmp_path, bytes(data))
        except DataError:
            message += 1
    assert message > 20


def test_keys_that_jax_cannot_sort_keep_their_order(tmp_path: Path) -> None:
    value = {"state": {"step": 2, 1: {"m": 0.5}, 7: {"m": 1.5}, b"x": 1, 2.5: 2, False: 3, "ä": 4}}
    found = read(tmp_path, pickle.dumps(value))
    assert type(found["state"]) is collections.OrderedDict
    assert [(type(key), key) for key in found["state"]] == [(type(key), key) for key in value["state"]]
    assert found == value
    assert jax.tree.leaves(found) == jax.tree.leaves(list(value["state"].values()))
    assert "not UTF-8" in read(tmp_path, pickle.dumps({1: 2, "\ud800": 1})).data.reason


def test_unsupported_values_are_leaves_that_cannot_be_read(tmp_path: Path) -> None:
    value = {"set": {1}, "same": {0: 2, "0": 3}, "name": os.path.join, "object": Path("/"), "surrogate": {"\ud800": 1}}
    found = read(tmp_path, pickle.dumps(value))
    assert found.keys() == value.keys()
    for name in value:
        with pytest.raises(DataError, match="leave it out with select="):
            array_of(found[name])
    assert isinstance(unpickle(str(tmp_path / "x.pkl"))["object"], OpaqueObject)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_repeated_key_of_a_dict_is_an_error(tmp_path: Path, protocol: int) -> None:
    for items in ({"a0": 1, "a1": 2, "b": 3}, {"a0": 1}):
        written = pickle.dumps([items, {"a1": 2}], protocol).replace(b"a1", b"a0")
        (tmp_path / "x").write_bytes(written)
        if len(items) > 1:
            with pytest.raises(DataError, match="the same key twice"):
                unpickle(str(tmp_path / "x"))
        else:
            assert unpickle(str(tmp_path / "x")) == [{"a0": 1}, {"a0": 2}]
