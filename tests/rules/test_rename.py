"""`rename=` of the root of the tree, and of leaves that are not selected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt

W = np.arange(3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    jaxckpt.save(tmp_path / "c", {"w": W, "a": {"b": np.ones(2), "c": 1}})
    return tmp_path / "c"


@pytest.mark.parametrize("read", [jaxckpt.restore, jaxckpt.load_numpy, jaxckpt.open])
def test_a_leaf_is_not_the_root_of_a_tree_with_others(read: Any, saved: Path) -> None:
    with pytest.raises(jaxckpt.errors.TreeError, match="leaf 'w' the whole tree, but 3 leaves are selected"):
        read(saved, rename={"w": ""})


def test_a_conversion_with_a_leaf_as_the_root_of_others_is_refused(saved: Path) -> None:
    with pytest.raises(jaxckpt.errors.TreeError, match="the whole tree"):
        jaxckpt.convert(saved, saved.parent / "d", rename={"w": ""})
    assert not (saved.parent / "d").exists()


def test_a_single_selected_leaf_becomes_the_tree(saved: Path) -> None:
    for target in (None, np.zeros(3, W.dtype)):
        assert np.array_equal(jaxckpt.restore(saved, target, select="", rename={"w": ""}), W)
    assert np.array_equal(jaxckpt.restore(saved, np.zeros(3, W.dtype), rename={"w": ""}, strict=False), W)
    jaxckpt.convert(saved, saved.parent / "d", select="", rename={"w": ""})
    assert np.array_equal(jaxckpt.load_numpy(saved.parent / "d"), W)


def test_unselected_leaves_do_not_conflict_with_new_names(saved: Path) -> None:
    tree = jaxckpt.restore(saved, select="a/b/c", rename={"w": "a/b/c"})
    assert list(tree) == ["a"]
    assert np.array_equal(tree["a"]["b"]["c"], W)
    with pytest.raises(jaxckpt.errors.TreeError, match="'a/b/c' is below another leaf"):
        jaxckpt.restore(saved, rename={"w": "a/b/c"})


# Leaves that take the place of others ---------------------------------------------------------------------


@pytest.fixture
def averaged(tmp_path: Path) -> Path:
    """Parameters, and an average of them that lacks one leaf."""
    params = {"w//": np.zeros(1), "b": {"~": np.zeros(1)}}
    jaxckpt.save(tmp_path / "c", {"params": params, "ema": {"w//": np.ones(1), "b": {"~": np.ones(1)}}, "step": 3})
    return tmp_path / "c"


def test_a_renamed_container_replaces_another_if_leaves_are_selected(averaged: Path) -> None:
    expected = {"params": {"b": {"~": np.ones(1)}, "w//": np.ones(1)}}
    assert jaxckpt.restore(averaged, rename={"ema": "params"}, select="params") == expected
    assert jaxckpt.load_numpy(averaged, rename={"ema": "params"}, select="params") == expected
    target = {"params": {"b": {"~": np.zeros(1)}, "w//": np.zeros(1)}}
    assert jaxckpt.restore(averaged, target, rename={"ema": "params"}, select="params") == expected
    whole = jaxckpt.restore(averaged, {**target, "step": 0}, rename={"ema": "params"}, select=lambda path: True)
    assert whole == {**expected, "step": 3}


def test_a_replacing_container_is_never_completed_from_the_replaced_one(averaged: Path) -> None:
    rename = {"ema/w//".replace("//", "~1~1"): "params/w~1~1"}
    mixed = jaxckpt.load_numpy(averaged, rename=rename, select="params")
    assert mixed == {"params": {"b": {"~": np.zeros(1)}, "w//": np.ones(1)}}, "a leaf by its own name"
    saved = jaxckpt.load_numpy(averaged)
    jaxckpt.save(averaged, {**saved, "ema": {"w//": np.ones(1)}}, overwrite=True)
    target = {"params": {"b": {"~": np.zeros(1)}, "w//": np.zeros(1)}}
    with pytest.raises(jaxckpt.MismatchError, match="'params/b/~0' is not in the checkpoint"):
        jaxckpt.restore(averaged, target, rename={"ema": "params"}, select="params")


def test_two_renamed_leaves_never_replace_each_other(averaged: Path) -> None:
    for rename in ({"ema": "x", "params": "x"}, lambda path: path.replace("ema", "params")):
        with pytest.raises(jaxckpt.errors.TreeError, match="the same path"):
            jaxckpt.restore(averaged, rename=rename, select="**")
