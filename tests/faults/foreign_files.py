"""Damaged files of other libraries' checkpoints, for the fuzzer.

An input is two bytes, which choose a file of one of the checkpoints, and the new content of that file.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxckpt
from jaxckpt.errors import NotACheckpointError, TreeError, UnsupportedError

_EXPECTED = (jaxckpt.CorruptError, NotACheckpointError, UnsupportedError, TreeError, jaxckpt.errors.InputError)
_WORDS = [b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\x80\x02", b"\xdd\xff\xff\xff\xff",
          b"[" * 99, b"-1", b"1e999", b"NaN", b"..", b"/", b"{}", b"[]", b'""', b"null", b"9" * 30, b"|O", b">f4",
          b"V2"]  # fmt: skip


class Range:
    """Copies of checkpoints to start from, one file of which an input replaces."""

    def __init__(self, folder: Path, checkpoints: list[str]) -> None:
        self._files: list[tuple[Path, Path, bytes]] = []
        for number, name in enumerate(checkpoints):
            source, copy = Path(name), folder / str(number) / Path(name).name
            copy.parent.mkdir()
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
            files = sorted(file for file in copy.rglob("*") if file.is_file()) if copy.is_dir() else [copy]
            self._files += [(copy, file, content) for file in files if len(content := file.read_bytes()) < 65_000]

    def seeds(self) -> list[bytes]:
        return [number.to_bytes(2, "little") + content for number, (_, _, content) in enumerate(self._files)]

    def mutated(self, case: bytes, draw: random.Random) -> bytes:
        content = bytearray(case)
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            at = draw.randrange(2, max(3, draw.choice((len(content), min(300, len(content))))))
            match draw.randrange(6):
                case 0 | 1 if at < len(content):
                    content[at] ^= 1 << draw.randrange(8)
                case 2 if at < len(content):
                    content[at] = draw.randrange(256)
                case 3:
                    word = draw.choice(_WORDS)
                    content[at : at + draw.choice((0, len(word)))] = word
                case 4:
                    end = at + draw.randrange(1, 64)
                    content[at:at] = content[at:end] * draw.choice((1, 1, 50))
                case _:
                    del content[at : at + draw.choice((1, 4, 8, len(content)))]
        return bytes(content)

    def attempt(self, case: bytes) -> str:
        """The outcome of reading the case: "a tree" or the name of a typed error. Raises on any other outcome."""
        path, file, original = self._files[int.from_bytes(case[:2].ljust(2, b"\0"), "little") % len(self._files)]
        file.write_bytes(case[2:])
        try:
            _read(path)
            return "a tree"
        except _EXPECTED as error:
            if len(str(error)) > 100_000:
                raise AssertionError("an endless message") from error
            return type(error).__name__
        finally:
            file.write_bytes(original)


def _read(path: Path) -> Any:
    """Read a checkpoint; if it has leaves of an unsupported kind, the others."""
    checkpoint = jaxckpt.open(path)
    repr(checkpoint)
    if (path / "config.json").exists():
        jaxckpt.rules.huggingface_rules(path)
    try:
        tree = jaxckpt.load_numpy(path)
    except UnsupportedError:
        others = {problem.leaf for problem in jaxckpt.verify(path).unsupported}
        tree = jaxckpt.load_numpy(path, select=lambda leaf: leaf not in others)
    for leaf in jax.tree.leaves(tree):
        assert isinstance(leaf, (np.ndarray, np.generic, str, bytes, int, float, complex)), type(leaf)
