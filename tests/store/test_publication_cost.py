"""What publication costs on a file system: one small file is linked or renamed, whatever the size, and never a folder.

GCSFuse and other FUSE mounts of buckets copy each object below a folder that is renamed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

import jaxckpt

_renamed: list[tuple[bool, int, str]] | None = None


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _renamed is not None and event in ("os.rename", "os.link"):
        source = os.fspath(arguments[0])  # type: ignore[arg-type]
        _renamed.append((os.path.isdir(source), os.path.getsize(source), os.path.basename(str(arguments[1]))))


sys.addaudithook(_note)  # it cannot be removed


def renamed_by_a_save(directory: Path, n_objects: int) -> list[tuple[bool, int, str]]:
    global _renamed
    options = jaxckpt.Options(object_bytes=1 << 14, chunk_bytes=1 << 12)
    with jaxckpt.Checkpointer(directory, options=options, background=False) as checkpoints:
        checkpoints.save(1, {"w": np.zeros(9)})
        _renamed = []
        try:
            checkpoints.save(2, {f"leaf {number}": np.full(1 << 12, number + 0.5) for number in range(n_objects)})
            return _renamed
        finally:
            _renamed = None


def test_publication_renames_one_small_file_whatever_the_size(tmp_path: Path) -> None:
    small, large = renamed_by_a_save(tmp_path / "small", 1), renamed_by_a_save(tmp_path / "large", 60)
    assert not any(is_folder for is_folder, _, _ in small + large)
    assert [name for _, _, name in small] == [name for _, _, name in large]
    assert [name for _, _, name in large].count("manifest.json") == 1
    assert max(size for _, size, _ in large) < 40_000
