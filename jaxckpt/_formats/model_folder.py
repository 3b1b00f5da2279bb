"""The files of a folder that hold its model, as transformers and diffusers choose them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxckpt.errors import DataError, show_path

STEMS = ("model", "diffusion_pytorch_model", "pytorch_model", "adapter_model")
_NUMBERED = re.compile(r"(.*\D)(\d+)-of-(\d+)(\.\w+)")


def preferred(names: Collection[str], suffix: str) -> str | None:
    """The name that these libraries read by default, not a variant such as "model.fp16.safetensors"."""
    return next((name for stem in STEMS if (name := stem + suffix) in names), None)


def complete_series(names: Collection[str]) -> Sequence[str] | None:
    """The names in order if all are the numbered files 1 to n of one model, as "model-00001-of-00002.safetensors"."""
    matches = sorted((int(match[2]), match) for name in names if (match := _NUMBERED.fullmatch(name)))
    numbers = [number for number, _ in matches]
    if len(matches) != len(names) or len({(m[1], int(m[3]), m[4]) for _, m in matches}) != 1:
        return None
    return [match[0] for _, match in matches] if numbers == list(range(1, int(matches[0][1][3]) + 1)) else None


def merged(files: Mapping[str, Mapping[Any, Any]]) -> dict[Any, Any]:
    """The tensors of several files. Raises DataError if two have one of the same name."""
    tensors: dict[Any, Any] = {}
    for file, content in files.items():
        if both := tensors.keys() & content.keys():
            raise DataError(
                f"{file}: the tensor {show_path(str(min(both, key=str)))} is also in another file of the folder"
            )
        tensors |= content
    return tensors
