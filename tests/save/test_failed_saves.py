"""What a save that fails leaves at its path: what was there before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt
from jaxckpt._model import zarr
from jaxckpt._store.files import FileWriter
from jaxckpt._store.folder import Folder


def refuse(*_: object, **__: object) -> Any:
    raise jaxckpt.errors.StorageError(28, "no space")


def run_save(path: Path) -> None:
    jaxckpt.save(path, {"w": np.zeros(9)})


def run_save_async(path: Path) -> None:
    jaxckpt.save_async(path, {"w": np.zeros(9)}).wait(60)


def run_checkpointer(path: Path) -> None:
    with jaxckpt.Checkpointer(path.parent) as checkpoints:
        checkpoints.save(int(path.name), {"w": np.zeros(9)})


@pytest.mark.parametrize("save", [run_save, run_save_async, run_checkpointer])
@pytest.mark.parametrize(
    ("place", "method"),
    [(FileWriter, "write"), (Folder, "publish"), (zarr, "metadata"), (Folder, "_create_data_folder")],
)
@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_first_save_leaves_no_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[[Path], None],
    place: Any,
    method: str,
    exists: bool,
) -> None:
    path = tmp_path / "run" / "00000001"
    path.parent.mkdir()
    if exists:
        path.mkdir(mode=0o700)
    with monkeypatch.context() as patched:
        patched.setattr(place, method, refuse)
        with pytest.raises(jaxckpt.errors.StorageError, match="no space"):
            save(path)
    # A Checkpointer deletes the folder of an unfinished step in any case, before it saves.
    assert path.exists() == (exists and save is not run_checkpointer)
    assert not path.exists() or not list(path.iterdir())
    save(path)
    assert jaxckpt.load_numpy(path)["w"].shape == (9,)


@pytest.mark.parametrize(
    ("tree", "arguments", "expected"),
    [
        (
            {"w": np.ma.masked_array([1.0, 2.0], [True, False])},
            {},
            "'w' is a MaskedArray; save its .data",
        ),
        ({"w": np.zeros(3)}, {"process_state": ["a"]}, "process_state must be a mapping of names"),
        ({"w": np.empty((0, 1 << 40), "float32")}, {}, "would have 8388608 chunks: give larger Options.chunk_bytes"),
    ],
)
def test_what_cannot_be_saved_leaves_nothing(
    tmp_path: Path, tree: Any, arguments: dict[str, Any], expected: str
) -> None:
    with pytest.raises(jaxckpt.JaxckptError, match=expected):
        jaxckpt.save(tmp_path / "c", tree, **arguments)
    assert not (tmp_path / "c").exists()
