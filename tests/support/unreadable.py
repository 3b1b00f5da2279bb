"""Damage to a step of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def _object(step: Path) -> Path:
    return max((path for path in step.glob("data-*/*/c/**/*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(step: Path) -> None:
    content = bytearray(_object(step).read_bytes())
    content[len(content) // 3] ^= 4
    _object(step).write_bytes(content)


def flip_manifest(step: Path) -> None:
    content = bytearray((step / "manifest.json").read_bytes())
    content[len(content) // 2] ^= 4
    (step / "manifest.json").write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit flipped": flip,
    "an object emptied": lambda step: _object(step).write_bytes(b""),
    "an object missing": lambda step: _object(step).unlink(),
    "the manifest lost": lambda step: (step / "manifest.json").unlink(),
    "the manifest flipped": flip_manifest,
}
