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
