"""The names of tensors come back as they were, through any chain of conversions; and so do the keys of a tree."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._cli.main import main
from jaxckpt.rules import Rule, Rules

numpy = pytest.importorskip("safetensors.numpy")

UNFRIENDLY = [
    ["mlp/~/linear_0/w", "mlp/~/linear_0/b"],  # Haiku
    ["evoformer/half_logits//bias", "evoformer/half_logits//weights"],  # AlphaFold
    ["/lead", "trail/", "//", "/"],
    ["a~b"],
    ["a~0b", "a~b", "a~1b", "a/b", "a~00b"],
    ["~", "~0", "~1", "~2", "x/~2"],
    ["a", "a/b"],
    ["", "a"],
    [""],
    [".", "..", "./a", "../b"],
    ["a\nb", "é/ü", "e\u0301", "🙂", "a b\t", "w.npy", "a\\b", "*", "[0]", "{i}"],
]


def tensors_of(names: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.full(number % 3 + 1, number, np.float32) for number, name in enumerate(names)}


def write_theirs(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write a file as programs without jaxckpt do."""
    if path.suffix == ".npz":
        np.savez(path, **cast("Any", tensors))
    else:
        numpy.save_file(dict(tensors), path)


def read_theirs(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read a file or folder as programs without jaxckpt do."""
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return dict(archive)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return dict(itertools.chain.from_iterable(numpy.load_file(file).items() for file in files))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return [*left] == [*right] and all(same(left[key], right[key]) for key in left)
    return strategies.raw(left) == strategies.raw(right)


def in_order(tree: Any) -> Any:
    """The tree with the keys of its dicts in JAX's order."""
    return {key: in_order(tree[key]) for key in sorted(tree)} if isinstance(tree, dict) else tree


FORMATS = {"file": "{}.safetensors", "folder": "{}-folder", "npz": "{}.npz", "zarr": "{}.zarr"}
FORMATS |= {"ours": "{}-ours", "orbax": "{}-orbax"}
REFUSED = {"orbax", "zarr"}
"""The formats that do not allow some of the names."""


def convert_along(chain: list[str], path: Path) -> tuple[Path, list[str]]:
    """Convert along a chain of formats; the last path, and the formats that refused these names."""
    refused: list[str] = []
    for number, kind in enumerate(chain):
        destination = path.parent / FORMATS[kind].format(number)
        format = {"folder": "safetensors", "orbax": "orbax"}.get(kind)
        try:
            jaxckpt.convert(path, destination, format=format)
        except jaxckpt.errors.TreeError:
            refused.append(kind)
            continue
        assert jaxckpt.diff(path, destination).identical
        path = destination
    return path, refused


@pytest.mark.parametrize("names", UNFRIENDLY, ids=str)
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_foreign_name_is_data(suffix: str, names: list[str], tmp_path: Path) -> None:
    tensors = tensors_of(names)
    chain = ["file", "npz", "ours", "npz", "ours", "folder", "orbax", "file", "zarr"]
    for end in ("file", "folder", "npz"):
        folder = tmp_path / end
        folder.mkdir()
        write_theirs(folder / f"theirs{suffix}", tensors)
        last, refused = convert_along([*chain, end], folder / f"theirs{suffix}")
        assert set(refused) <= REFUSED
        written = read_theirs(last)
        assert written.keys() == tensors.keys()
        assert all(same(written[name], tensors[name]) for name in names)


any_name = st.one_of(
    st.sampled_from([name for names in UNFRIENDLY for name in names]),
    st.text(st.sampled_from("~/012ab."), max_size=6),
    st.text(max_size=5),
)
chains = st.lists(st.sampled_from([*FORMATS]), min_size=1, max_size=5)


@settings(max_examples=40)
@given(st.sets(any_name, min_size=1, max_size=5), chains, st.sampled_from(["file", "npz"]))
def test_foreign_names_survive_any_chain(names: set[str], chain: list[str], end: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tensors = tensors_of(sorted(names))
        write_theirs(Path(folder) / "theirs.safetensors", tensors)
        last, refused = convert_along([*chain, end], Path(folder) / "theirs.safetensors")
        assert set(refused) <= (REFUSED | {"npz"} if any("\0" in name for name in names) else REFUSED)
        if last.suffix not in (".safetensors", ".npz"):  # the name cannot be written to an npz
            return
        written = read_theirs(last)
        assert written.keys() == names
        assert all(same(written[name], tensors[name]) for name in names)


trees = st.recursive(
    st.integers(0, 9).map(lambda number: jnp.full(2, number)),
    lambda below: st.dictionaries(any_name, below, min_size=1, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(trees, chains)
def test_keys_survive_any_chain(tree: Any, chain: list[str]) -> None:
    """Also keys with a "/", whose names do not say which of them is a key."""
    with tempfile.TemporaryDirectory() as folder:
        jaxckpt.save(f"{folder}/first", tree)
        last, _ = convert_along(chain, Path(folder) / "first")
        assert same(jaxckpt.load_numpy(last), in_order(tree))


def test_keys_with_a_slash_survive_in_zarr(tmp_path: Path) -> None:
    tree = {"mlp/~/linear_0": {"w": np.ones(2), "n/m": 3}, "a": {"b": np.zeros(1)}}
    jaxckpt.save(tmp_path / "ours", tree)
    jaxckpt.convert(tmp_path / "ours", tmp_path / "a.zarr")
    assert jaxckpt.diff(tmp_path / "ours", tmp_path / "a.zarr").identical
    file = tmp_path / "a.zarr" / "zarr.json"
    file.write_text(file.read_text().replace('"mlp~1~0~1linear_0/w"', "1"))
    with pytest.raises(jaxckpt.errors.DataError, match=r"zarr\.json is damaged"):
        jaxckpt.open(tmp_path / "a.zarr")


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz"])
@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"a~b": 1}, ["a~b"]),
        ({"mlp/~/linear_0": {"w": 1}}, ["mlp/~/linear_0/w"]),  # Haiku
        ({"a/b": 1, "a": 2}, ["a", "a/b"]),
        ({"": 1}, [""]),
        ({"a": {"": {"b": 1}}, "c//d": 2}, ["a//b", "c//d"]),
    ],
)
def test_a_tree_is_exported_by_its_keys_and_read_back(tree: Any, names: list[str], name: str, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ours", tree)
    jaxckpt.convert(tmp_path / "ours", tmp_path / name)
    assert sorted(read_theirs(tmp_path / name)) == names
    read = jaxckpt.load_numpy(tmp_path / name)
    assert same(read, jax.tree.map(np.asarray, in_order(tree)))


def test_a_recorded_path_of_another_name_does_not_count(tmp_path: Path) -> None:
    for metadata in ({"jaxckpt.paths": '{"a/b": "x~1y", "c/d": "c~1d", "e/f": "e//f", "gone": "g~1h"}'}, None):
        numpy.save_file({name: np.zeros(1) for name in ("a/b", "c/d", "e/f")}, tmp_path / "a.safetensors", metadata)
        expected = ["a/b", "c~1d" if metadata else "c/d", "e/f"]
        assert list(jaxckpt.open(tmp_path / "a.safetensors")) == expected
    numpy.save_file({"a": np.zeros(1)}, tmp_path / "a.safetensors", {"jaxckpt.paths": "[1"})
    with pytest.raises(jaxckpt.errors.DataError, match=r"its jaxckpt\.paths is damaged"):
        jaxckpt.open(tmp_path / "a.safetensors")


def test_leaves_that_would_share_a_name_are_an_error(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ours", {"a/b": np.zeros(1), "a": {"b": np.ones(1)}, "c": np.ones(1)})
    for name in ("a.safetensors", "a.npz", "a.zarr"):
        with pytest.raises(jaxckpt.errors.TreeError, match=r"'a/b' and 'a~1b' would both be named 'a/b'"):
            jaxckpt.convert(tmp_path / "ours", tmp_path / name)
    jaxckpt.convert(tmp_path / "ours", tmp_path / "a.npz", rename={"a~1b": "d"})
    jaxckpt.convert(tmp_path / "ours", tmp_path / "b.npz", select=["c", "a"])
    assert sorted(read_theirs(tmp_path / "a.npz")) == ["a/b", "c", "d"]


def test_a_state_dict_of_torch_keeps_its_names(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for names in UNFRIENDLY:
        torch.save({name: torch.full((2,), 1.0) for name in names}, tmp_path / "theirs.pt")
        jaxckpt.convert(tmp_path / "theirs.pt", tmp_path / "to.safetensors", overwrite=True)
        assert read_theirs(tmp_path / "to.safetensors").keys() == {*names}


def test_nodes_of_a_zarr_group_have_the_names(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    numpy.save_file(tensors_of(["mlp/~/w", "a~b", "a~0b", "é"]), tmp_path / "theirs.safetensors")
    jaxckpt.convert(tmp_path / "theirs.safetensors", tmp_path / "to.zarr")
    group = zarr.open_group(tmp_path / "to.zarr", mode="r")
    assert {path for path, node in group.members(max_depth=None) if isinstance(node, zarr.Array)} == {
        "mlp/~/w",
        "a~b",
        "a~0b",
        "é",
    }
    for name in ("x//bias", "/lead", "trail/", "../up", "a/./b"):
        numpy.save_file(tensors_of([name]), tmp_path / "theirs.safetensors")
        with pytest.raises(jaxckpt.errors.TreeError, match="has a name that Zarr does not allow"):
            jaxckpt.convert(tmp_path / "theirs.safetensors", tmp_path / "no.zarr")
    jaxckpt.convert(tmp_path / "theirs.safetensors", tmp_path / "no.zarr", rename={"a/./b": "a/b"})


def test_names_of_ranks_of_mindspore(tmp_path: Path) -> None:
    for rank in range(2):
        numpy.save_file({"a~1b/~/w": np.full(2, rank)}, tmp_path / f"{rank}.safetensors")
    files = {rank: tmp_path / f"{rank}.safetensors" for rank in range(2)}
    found = jaxckpt.formats.mindspore_ranks(files, mesh={"x": 2}, specs={"a~1b/~/w": P("x")})
    jaxckpt.convert(found, tmp_path / "to.safetensors")
    assert read_theirs(tmp_path / "to.safetensors")["a~1b/~/w"].tolist() == [0, 0, 1, 1]


def test_names_of_rank_files(tmp_path: Path) -> None:
    for rank in range(2):
        arrays: Any = {"a~1b/~/w": np.full(2, rank), "x//b": np.full(2, rank), "step": 7}
        np.savez(tmp_path / f"{rank}.npz", **arrays)
    files = {rank: tmp_path / f"{rank}.npz" for rank in range(2)}
    seen: list[str] = []

    def by_path(path: str, leaf: Any) -> P:
        seen.append(path)
        return P("rank") if leaf.shape else P()

    specs = {"a~1b/~/w": P("rank"), "x": P("rank")}
    for found in (
        jaxckpt.formats.rank_files(files, specs=specs),
        jaxckpt.formats.rank_files(files, specs=by_path),
    ):
        jaxckpt.convert(found, tmp_path / "to.safetensors", overwrite=True)
        written = read_theirs(tmp_path / "to.safetensors")
        assert {name: array.tolist() for name, array in written.items()} == {
            "a~1b/~/w": [0, 0, 1, 1],
            "x//b": [0, 0, 1, 1],
            "step": 7,
        }
    assert seen == ["a~01b/~0/w", "x/~2/b", "step"]


# Names in arguments ---------------------------------------------------------------------------------------


@pytest.fixture
def haiku(tmp_path: Path) -> Path:
    path = tmp_path / "haiku.safetensors"
    numpy.save_file(tensors_of(["mlp/~/linear_0/w", "mlp/~/linear_0/b", "x//bias"]), path)
    return path


def test_select_and_rename_by_the_path_that_is_listed(haiku: Path, tmp_path: Path) -> None:
    for path in jaxckpt.open(haiku):
        assert list(jaxckpt.open(haiku)[path].slabs())
        jaxckpt.convert(haiku, tmp_path / "one.npz", select=path, overwrite=True)
        assert list(jaxckpt.open(tmp_path / "one.npz")) == [path]
        jaxckpt.convert(haiku, tmp_path / "one.npz", rename={path: "new"}, select="new", overwrite=True)
        assert list(read_theirs(tmp_path / "one.npz")) == ["new"]
    listed = json.loads(CliRunner().invoke(main, ["show", str(haiku), "--json"]).stdout)
    assert [leaf["path"] for leaf in listed["leaves"]] == list(jaxckpt.open(haiku))
    for leaf in listed["leaves"]:
        assert CliRunner().invoke(main, ["cat", str(haiku), leaf["path"]]).exit_code == 0


@pytest.mark.parametrize("name", ["mlp/~/linear_0/w", "x//bias", "mlp/~/*", "**/~/linear_0"])
def test_a_name_in_place_of_a_path_is_an_error_that_gives_the_path(name: str, haiku: Path) -> None:
    with pytest.raises(jaxckpt.errors.TreeError, match="did you mean") as caught:
        jaxckpt.load_numpy(haiku, select=name)
    given = str(caught.value).rpartition("did you mean '")[2].rstrip("?'")
    assert jaxckpt.load_numpy(haiku, select=given)


@pytest.mark.parametrize(("path", "written"), [("a~b", "a~0b"), ("a/~/b", "a/~0/b"), ("a~2", "a~02"), ("~", "~0")])
def test_a_new_path_that_no_keys_have_is_an_error_that_gives_the_path(
    path: str, written: str, haiku: Path, tmp_path: Path
) -> None:
    for rename in ({"x/~2/bias": path}, lambda old: path if old == "x/~2/bias" else old):
        with pytest.raises(jaxckpt.errors.TreeError, match=f"which must be written '{written}'"):
            jaxckpt.convert(haiku, tmp_path / "to.npz", rename=rename)
    for argument in ("source", "target", "scales", "copies"):
        with pytest.raises(jaxckpt.errors.InputError, match=rf"Rule\.{argument} '{path}' must be written '{written}'"):
            Rule(**cast("Any", {"source": "s", "target": "t", argument: path}))
    jaxckpt.convert(haiku, tmp_path / "to.npz", rename={"x/~2/bias": written}, select=written)
    assert list(read_theirs(tmp_path / "to.npz")) == [path]


def test_rules_make_names_and_back(haiku: Path, tmp_path: Path) -> None:
    rules = Rules(
        [
            Rule(source="mlp/~0/linear_{i}/w", target="layers/{i}/w"),
            Rule(source="mlp/~0/linear_{i}/b", target="layers/{i}/b"),
            Rule(source="x/~2/bias", target="bias"),
        ]
    )
    jaxckpt.convert(haiku, tmp_path / "ours", rename=rules)
    jaxckpt.convert(tmp_path / "ours", tmp_path / "back.safetensors", rename=rules.inverse())
    assert read_theirs(tmp_path / "back.safetensors").keys() == read_theirs(haiku).keys()
    assert jaxckpt.diff(haiku, tmp_path / "back.safetensors").identical


def test_diff_sees_that_a_tensor_was_renamed(tmp_path: Path) -> None:
    numpy.save_file(tensors_of(["mlp/~/w"]), tmp_path / "a.safetensors")
    numpy.save_file(tensors_of(["mlp/~0/w"]), tmp_path / "b.safetensors")
    assert not jaxckpt.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").identical


def test_a_file_is_restored_into_the_two_levels_of_haiku(haiku: Path) -> None:
    """A key of a target may contain what a file divides into several keys: a function moves the border."""
    target = {"mlp/~/linear_0": {"b": jnp.zeros(2), "w": jnp.zeros(1)}}

    def in_two_levels(path: str) -> str:
        return re.sub("/(?=.*/)", "~1", path) if path.startswith("mlp/") else path

    tree = jaxckpt.restore(haiku, target, select="mlp*/*", rename=in_two_levels)
    assert tree["mlp/~/linear_0"]["b"].tolist() == [1, 1]
