"""Errors: their structured problems and their messages."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt
from jaxckpt import errors

PROBLEMS = [
    jaxckpt.errors.Problem("w", "is not in the checkpoint", "pass strict=False"),
    jaxckpt.errors.Problem("v", "is not in the checkpoint", "pass strict=False"),
    jaxckpt.errors.Problem("w", "is missing", object="data-1/0/c/0", box=((0, 4), (8, 16))),
    jaxckpt.errors.Problem(None, "is damaged", object="manifest.json"),
]


def test_a_problem_names_the_leaf_the_file_or_both() -> None:
    assert [*map(str, PROBLEMS)] == [
        "'w' is not in the checkpoint",
        "'v' is not in the checkpoint",
        "'w'[0:4, 8:16]: data-1/0/c/0 is missing",
        "manifest.json is damaged",
    ]


def test_an_error_lists_its_problems_and_each_remedy_once() -> None:
    error = jaxckpt.MismatchError.of("they differ", PROBLEMS[:2], "see the manual")
    assert str(error) == (
        "they differ:\n  'w' is not in the checkpoint\n  'v' is not in the checkpoint\n"
        "see the manual; pass strict=False"
    )
    assert (error.problems, error.paths) == (tuple(PROBLEMS[:2]), ("w", "v"))
    assert isinstance(error, jaxckpt.MismatchError)


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)], ids=str)
def test_every_error_can_carry_problems_and_be_pickled(kind: type) -> None:
    if not issubclass(kind, errors.JaxckptError):
        return
    assert kind("plain").problems == ()
    error = kind.of("wrong", PROBLEMS)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems, again.paths) == (str(error), tuple(PROBLEMS), ("w", "v"))


def test_a_storage_error_keeps_its_number() -> None:
    error = jaxckpt.errors.StorageError(28, "no space")
    assert (error.errno, error.strerror, error.problems) == (28, "no space", ())


@pytest.mark.parametrize("foreign", [False, True], ids=["jaxckpt", "npz"])
@pytest.mark.parametrize(
    "read",
    [
        jaxckpt.restore,
        jaxckpt.load_numpy,
        lambda path: jaxckpt.open(path)["damaged/w"][...],
        lambda path: jaxckpt.convert(path, path.with_name("out.safetensors")),
    ],
    ids=["restore", "load_numpy", "open", "convert"],
)
def test_the_error_of_a_read_names_the_damaged_leaf(read: Callable[[Path], Any], foreign: bool, tmp_path: Path) -> None:
    path, stored = tmp_path / "checkpoint", np.arange(12, dtype=np.float32)
    jaxckpt.save(path, {"intact": np.arange(5, dtype=np.int32), "damaged": {"w": stored}})
    if foreign:
        jaxckpt.convert(path, path := tmp_path / "checkpoint.npz")
    (file,) = (file for file in (path, *path.rglob("*")) if file.is_file() and stored.tobytes() in file.read_bytes())
    content = bytearray(file.read_bytes())
    content[content.index(stored.tobytes())] ^= 1
    file.write_bytes(content)
    with pytest.raises(errors.DataError) as caught:
        read(path)
    (problem,) = caught.value.problems
    assert (caught.value.paths, problem.leaf) == (("damaged/w",), "damaged/w")
    assert problem.reason.startswith("cannot be read: ")
    assert "jaxckpt.verify" in problem.remedy


def test_an_error_names_the_leaf_whose_chunk_is_damaged(tmp_path: Path) -> None:
    tree = {name: np.arange(1000.0) + number for number, name in enumerate("abc")}
    jaxckpt.save(tmp_path / "c", tree)
    (file,) = (tmp_path / "c").glob("data-*/*/c/0/0")
    content = bytearray(file.read_bytes())
    content[9000] ^= 1  # the second row
    file.write_bytes(content)
    for read in (jaxckpt.restore, jaxckpt.load_numpy):
        with pytest.raises(errors.DataError, match="cannot read leaf 'b': ") as raised:
            read(tmp_path / "c")
        assert raised.value.paths == ("b",)
        assert read(tmp_path / "c", select=["a", "c"]).keys() == {"a", "c"}


def test_an_error_through_rules_names_a_leaf_that_was_read(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {f"l{number}": np.arange(1000.0) + number for number in range(6)})
    (file,) = (tmp_path / "c").glob("data-*/*/c/0/0")
    content = bytearray(file.read_bytes())
    content[3 * 8000 + 1000] ^= 1  # in l3
    file.write_bytes(content)
    names = {f"l{number}": f"n{5 - number}" for number in range(6)}
    rules = jaxckpt.rules.Rules([jaxckpt.rules.Rule(source=old, target=new) for old, new in names.items()])
    with pytest.raises(errors.DataError) as raised:
        jaxckpt.load_numpy(tmp_path / "c", rename=rules)
    assert "n2" in raised.value.paths
    with pytest.raises(errors.DataError) as raised:
        jaxckpt.load_numpy(tmp_path / "c", select="l3")
    assert raised.value.paths == ("l3",)
