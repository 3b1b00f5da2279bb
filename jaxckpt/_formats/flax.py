"""Reads Flax's checkpoints in msgpack: one file, a folder of numbered ones, and the folders of transformers.

flax_model.msgpack                    `to_bytes`, also with an index of several files
<folder>/checkpoint_100               `flax.training.checkpoints.save_checkpoint` without Orbax
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import Any

from jaxckpt._arguments.pytree import flatten
from jaxckpt._formats.flax_msgpack import is_msgpack_map, read_msgpack
from jaxckpt._formats.index_files import preferred, read_indexed
from jaxckpt._formats.pickles import unreadable
from jaxckpt._model.paths import name_of_path
from jaxckpt._model.tree import Tree, nested_dicts
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ForeignCheckpoint
from jaxckpt._sources.format_registry import ForeignStep, Format
from jaxckpt._store.foreign_files import is_folder, names_in, read_head
from jaxckpt.errors import NotACheckpointError

_MODELS = ("flax_model.msgpack", "diffusion_flax_model.msgpack")
_INDEX = ".msgpack.index.json"
_STEP = re.compile(r"(|.*\D)(?<!\d\.)(\d{1,18})")  # not the decimals of a float
_PLACEHOLDERS = ("//GDAPlaceholder:", "//MPArrayPlaceholder:")


def recognizes(path: str, names: Collection[str]) -> bool:
    """Whether this is a file of Flax, or a folder with one; not if it has the same model for PyTorch."""
    if not names:
        return path.endswith((".msgpack", _INDEX)) or is_msgpack_map(read_head(path, 300))
    if any(name.endswith(".safetensors") for name in names) or preferred(names, ".bin"):
        return False
    return _model_in(names) is not None or bool(steps_in(path, names))


def steps_in(path: str, names: Collection[str]) -> list[ForeignStep]:
    """The numbered files in a folder, oldest first; none if they have several prefixes, as those of several runs."""
    numbered = sorted((int(match[2]), name, match[1]) for name in names if (match := _STEP.fullmatch(name)))
    prefixes = {start for _, name, start in numbered if is_msgpack_map(read_head(f"{path}/{name}", 300))}
    if len(prefixes) > 1:
        return []
    # Also damaged files, and folders that newer versions of Flax wrote through Orbax: none may hide the newest step.
    return [ForeignStep(number, f"{path}/{name}") for number, name, start in numbered if start in prefixes]


def open_flax(path: str) -> ForeignCheckpoint:
    """The tree of a file, or of the newest in a folder. Raises DataError, NotACheckpointError, StorageError."""
    metadata = None
    if names := names_in(path):
        if (model := _model_in(names)) is not None:
            path = f"{path}/{model}"
        elif steps := steps_in(path, names):
            if is_folder(steps[-1].path):
                raise NotACheckpointError(
                    f"{path}: the newest checkpoint is a folder, which Flax wrote through Orbax: open {steps[-1].path}"
                )
            path, metadata = steps[-1].path, {"step": steps[-1].number}
        else:  # deleted in the meantime
            raise NotACheckpointError(f"{path} has no checkpoint of Flax")
    if path.endswith(_INDEX):
        tree = nested_dicts(read_indexed(os.path.dirname(path), path, _named))
    else:
        tree = read_msgpack(path, _placeholder)
    return compose(path, tree, "flax", metadata=metadata)


def _model_in(names: Collection[str]) -> str | None:
    """The model in a folder as transformers and diffusers name it, or its index."""
    known = [name for model in _MODELS for name in (model, f"{model}.index.json") if name in names]
    return known[0] if known else None


def _named(path: str) -> dict[str, Any]:
    """The leaves of a file by their keys, joined with "/"."""
    return {name_of_path(leaf.path): leaf.value for leaf in flatten(read_msgpack(path))[0]}


def _placeholder(node: Any) -> Tree | None:
    """A leaf whose data several processes wrote elsewhere."""
    if isinstance(node, str) and node.startswith(_PLACEHOLDERS):
        return unreadable("is in the folder with the suffix _gda next to the file, which jaxckpt does not read")
    return None


FORMAT = Format("flax", recognizes, open_flax, index_names=_MODELS, steps_in=steps_in)
