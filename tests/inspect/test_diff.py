"""`diff` shows how far two checkpoints differ, independently of their layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import PASSED, RunPython

import jaxckpt


def saved(path: Path, tree: Any, **options: Any) -> Path:
    jaxckpt.save(path, tree, options=jaxckpt.Options(**options))
    return path


def test_layouts_do_not_matter(tmp_path: Path) -> None:
    w = np.arange(24 * 32.0, dtype=np.float32).reshape(24, 32)

    def tree(axes: tuple[str, ...], sizes: tuple[int, ...], spec: P) -> Any:
        mesh = Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), axes)
        return {"w": jax.device_put(w, NamedSharding(mesh, spec)), "small": [jnp.ones(3)] * 4, "n": 1, "s": "x"}

    a = saved(tmp_path / "a", tree(("x", "y"), (2, 4), P("x", "y")), chunk_bytes=256, object_bytes=512)
    b = saved(tmp_path / "b", tree(("z",), (3,), P(None)), compression="zstd")
    delta = jaxckpt.diff(a, b)
    assert delta.identical, delta
    assert len(delta.leaves) == 7
    assert "identical" in str(delta)


@pytest.mark.parametrize("host_bytes", [256 << 20, 1 << 14])
def test_differences_are_counted_and_measured(tmp_path: Path, host_bytes: int) -> None:
    w = np.random.default_rng(0).normal(size=(100, 300)).astype(np.float32)
    other = w.copy()
    other[3, 7] += 0.5
    other[99, 299] *= 2
    a = saved(tmp_path / "a", {"w": w, "same": w}, chunk_bytes=1024, object_bytes=8192)
    b = saved(tmp_path / "b", {"w": other, "same": w})
    delta = jaxckpt.diff(a, b, options=jaxckpt.Options(host_bytes=host_bytes))
    (leaf,) = delta.differing
    assert (leaf.path, leaf.size, leaf.differing) == ("w", 30_000, 2)
    gaps = np.abs(w.astype(np.float64) - other.astype(np.float64))
    assert leaf.max_abs == gaps.max()
    assert leaf.max_rel == (gaps / np.maximum(np.abs(w), np.abs(other)).astype(np.float64)).max()
    assert "2 of 30,000 elements differ" in str(delta)
    assert "\n1 of 2 leaves differs\n" in str(delta)
    assert not delta.identical
    assert delta.same_structure


@pytest.mark.parametrize(
    ("a", "b", "differing", "max_abs", "max_rel"),
    [
        (np.float32([0.0]), np.float32([-0.0]), 1, 0.0, 0.0),
        (np.float32([np.nan]), np.float32([1.0]), 1, np.inf, np.inf),
        (np.float32([np.inf]), np.float32([-np.inf]), 1, np.inf, np.inf),
        (np.float32([np.inf, 1.0]), np.float32([np.inf, 1.0]), 0, 0.0, 0.0),
        (np.uint32([0x7FC00000]).view(np.float32), np.uint32([0x7FC00001]).view(np.float32), 1, 0.0, 0.0),
        (np.int64([1, -5]), np.int64([1, 5]), 1, 10.0, 2.0),
        (np.bool_([True, False]), np.bool_([True, True]), 1, 1.0, 1.0),
        (np.complex64([3 + 4j]), np.complex64([0]), 1, 5.0, 1.0),
        (np.complex128([1, 2]), np.complex128([1, 2 + 1j]), 1, 1.0, 1 / np.sqrt(5)),
        (np.arange(4).astype(ml_dtypes.bfloat16), np.arange(4).astype(np.float32), 0, 0.0, 0.0),
        (np.array([1.0, 2.0]).astype(ml_dtypes.bfloat16), np.float32([1.0, 2.5]), 1, 0.5, 0.2),
        (np.array([-8, 7]).astype(ml_dtypes.int4), np.array([-8, 6]).astype(ml_dtypes.int4), 1, 1.0, 1 / 7),
        (np.zeros((0, 3)), np.zeros((0, 3)), 0, 0.0, 0.0),
        (np.float64(2.0), np.float64(3.0), 1, 1.0, 1 / 3),
        (np.int64([2**53 + 1, 7]), np.uint64([2**53, 7]), 1, 0.0, 0.0),
        (np.arange(16).astype(ml_dtypes.uint4), np.arange(16).astype(np.uint8), 0, 0.0, 0.0),
        (np.array([1, 15]).astype(ml_dtypes.uint4), np.array([1, 14]).astype(ml_dtypes.uint4), 1, 1.0, 1 / 15),
    ],
)
def test_values(tmp_path: Path, a: Any, b: Any, differing: int, max_abs: float, max_rel: float) -> None:
    (leaf,) = jaxckpt.diff(saved(tmp_path / "a", {"x": a}), saved(tmp_path / "b", {"x": b})).leaves
    assert (leaf.differing, leaf.max_abs) == (differing, max_abs)
    assert leaf.max_rel == pytest.approx(max_rel)
    assert leaf.identical == (not differing and a.dtype == b.dtype)


def test_structure_shapes_and_missing_leaves(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"x": [np.ones(3), 1], "y": np.ones((2, 2)), "s": "one", "k": jax.random.key(0)})
    b = saved(tmp_path / "b", {"x": (np.ones(3), 2), "z": np.ones(4), "s": "two", "k": jax.random.key(1)})
    delta = jaxckpt.diff(a, b)
    assert not delta.same_structure
    said = {leaf.path: str(leaf) for leaf in delta.differing}
    assert list(said) == ["k", "s", "x/1", "y", "z"]
    assert said["y"] == "'y': only in a (numpy float64[2, 2])"
    assert said["z"] == "'z': only in b (numpy float64[4])"
    assert "1 of 1 elements differ, largest difference 1" in said["x/1"]
    assert "1 of 2 elements differ" in said["k"]
    shapes = jaxckpt.diff(a, saved(tmp_path / "c", {"y": np.ones((4, 1))}), select="y")
    assert str(shapes.leaves[0]) == "'y': numpy float64[2, 2] → numpy float64[4, 1]"
    assert jaxckpt.diff(a, b, select="x/0").differing == ()


@pytest.mark.parametrize(
    ("a", "b", "differing"),
    [
        ("a", "a\0", 1),
        ("", "\0", 1),
        (b"a", b"a\0", 1),
        ("é", "é", 0),
        (2**70, 2**70 + 1, 1),
        (2**70, 3, 1),
        (3, 3.0, 0),
    ],
)
def test_values_in_the_manifest(tmp_path: Path, a: Any, b: Any, differing: int) -> None:
    (leaf,) = jaxckpt.diff(saved(tmp_path / "a", {"x": a}), saved(tmp_path / "b", {"x": b})).leaves
    assert (leaf.size, leaf.differing) == (1, differing)
    assert leaf.identical == (not differing and type(a) is type(b))
    assert not leaf.identical or leaf.kinds[0] == leaf.kinds[1]


def test_leaves_of_another_kind_are_equal_and_listed_apart(tmp_path: Path) -> None:
    key = jax.random.key_data(jax.random.key(3))
    tree = {
        "w": jnp.arange(6.0),
        "n": 3,
        "f": 0.5,
        "b": True,
        "c": 1j,
        "s": np.int32(7),
        "k": jax.random.key(3),
        "t": "x",
    }
    same = {"w": np.arange(6, dtype="f4"), "n": np.int64(3), "f": np.array(0.5), "b": np.bool_(True), "c": np.array(1j)}
    a = saved(tmp_path / "a", tree)
    b = saved(tmp_path / "b", {**same, "s": jnp.int32(7), "k": np.asarray(key), "t": "x"})
    delta = jaxckpt.diff(a, b)
    assert delta.identical, delta
    assert {leaf.path: leaf.kinds for leaf in delta.other_kinds} == {
        "w": ("jax", "numpy"), "n": ("int", "numpy_scalar"), "f": ("float", "numpy"), "b": ("bool", "numpy_scalar"),
        "c": ("complex", "numpy"), "s": ("numpy_scalar", "jax"), "k": ("threefry2x32", "numpy"),
    }  # fmt: skip
    assert "identical: 8 leaves, bit by bit; other kinds: " in str(delta)
    assert "jax → numpy (1 leaf)" in str(delta)
    other = {**same, "n": np.int32(3), "f": np.array(0.25), "s": np.array([7], "i4"), "k": np.asarray(key), "t": b"x"}
    delta = jaxckpt.diff(a, saved(tmp_path / "c", other))
    assert [leaf.path for leaf in delta.differing] == ["f", "n", "s", "t"]
    assert [(leaf.path, leaf.size, leaf.differing) for leaf in delta.differing[:2]] == [("f", 1, 1), ("n", 1, 0)]


def test_an_export_is_identical(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"params": {"w": jnp.ones((2, 3)), "b": np.zeros(3)}, "step": 3})
    jaxckpt.convert(a, tmp_path / "b.safetensors")
    delta = jaxckpt.diff(a, tmp_path / "b.safetensors")
    assert delta.identical, delta
    assert {leaf.path: leaf.kinds for leaf in delta.other_kinds} == {
        "params/b": ("numpy", "jax"),
        "step": ("int", "jax"),
    }


def test_a_selection_may_match_in_only_one_checkpoint(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", {"x": np.ones(3), "y": 1}), saved(tmp_path / "b", {"x": np.zeros(3)})
    assert [str(leaf) for leaf in jaxckpt.diff(a, b, select="y").leaves] == ["'y': only in a (int)"]
    assert [str(leaf) for leaf in jaxckpt.diff(b, a, select="y").leaves] == ["'y': only in b (int)"]
    with pytest.raises(jaxckpt.errors.TreeError, match="either"):
        jaxckpt.diff(a, b, select="z")


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[jaxckpt.types.Progress] = []
    a, b = (saved(tmp_path / name, {"x": np.ones(99), "n": 1, "s": "text", "e": np.empty((0, 2))}) for name in "ab")
    assert jaxckpt.diff(a, b, options=jaxckpt.Options(progress=seen.append)).identical
    assert seen[-1].done_bytes == seen[-1].total_bytes == 2 * 99 * 8


def test_damage_is_an_error(tmp_path: Path) -> None:
    a, b = (saved(tmp_path / name, {"x": np.arange(1000.0)}) for name in "ab")
    (file,) = b.glob("data-*/*/c/0/0")
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(jaxckpt.errors.DataError, match="'x'"):
        jaxckpt.diff(a, b)


def test_memory_is_bounded(run_python: RunPython, tmp_path: Path) -> None:
    run_python(
        f"""
        import jaxckpt, numpy as np
        small = np.zeros(32 << 20, np.int8)
        tree = {{"w": np.arange(64 << 20, dtype=np.float32), "small": small}}
        tree |= {{f"l{{i}}": np.ones(1 << 20) for i in range(32)}}
        for name in "ab":
            jaxckpt.save({str(tmp_path)!r} + "/" + name, tree, options=jaxckpt.Options(sync=False))
            tree["w"][5_000_000] += 1
            small += 1  # all elements differ; each takes eight bytes as a number that can be subtracted
        print("all checks passed")
        """,
        devices=1,
        word=PASSED,
    )
    printed = run_python(
        f"""
        import jaxckpt, psutil
        a, b = {str(tmp_path / "a")!r}, {str(tmp_path / "b")!r}
        before = psutil.Process().memory_info().rss
        delta = jaxckpt.diff(a, b, options=jaxckpt.Options(host_bytes=64 << 20))
        assert [(leaf.path, leaf.differing, leaf.max_abs) for leaf in delta.differing] == [
            ("small", 32 << 20, 1.0), ("w", 1, 1.0)
        ], delta
        most = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
        print(most * 1024 - before >> 20)  # ru_maxrss would include the parent's memory
        """,
        devices=1,
    )
    assert int(printed) < 200, "MiB of memory, for twice 512 MiB of data"


@pytest.mark.parametrize(
    ("a", "b", "max_abs"),
    [
        (2**60, 2**60 + 1, 1.0),
        (10**30, 10**30 + 1, 1.0),
        (2**2000, 1, np.inf),
        (np.int64([2**62, -(2**63)]), np.int64([2**62 + 3, 2**63 - 1]), float(2**64 - 1)),
        (np.uint64([2**63]), np.uint64([2**63 + 2]), 2.0),
    ],
)
def test_differences_of_integers_are_exact(tmp_path: Path, a: Any, b: Any, max_abs: float) -> None:
    (leaf,) = jaxckpt.diff(saved(tmp_path / "a", {"x": a}), saved(tmp_path / "b", {"x": b})).leaves
    assert leaf.differing == np.size(a)
    assert leaf.max_abs == max_abs


def test_containers_next_to_the_selected_leaves_do_not_count(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"x": {"y": 1}, "z": [1]})
    b = saved(tmp_path / "b", {"x": {"y": 1}, "z": (1, 2)})
    assert jaxckpt.diff(a, b, select="x").identical
    assert not jaxckpt.diff(a, b, select="z").same_structure
    with pytest.raises(TypeError, match="ambiguous"):
        bool(jaxckpt.diff(a, b))
