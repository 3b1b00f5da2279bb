"""The formats of other libraries that are read as if they were ours."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection

from jaxckpt._foreign import colossalai, dcp, mindspore, npz, oneflow, safetensors, torch
from jaxckpt._foreign import orbax_in as orbax
from jaxckpt._format.names import MANIFEST, is_data
from jaxckpt._restore.source import Format, formats
from jaxckpt._runtime.errors import JaxckptError
from jaxckpt._runtime.options import Options
from jaxckpt._storage.manifests import load_manifest
from jaxckpt._storage.place import store_at

FORMATS: tuple[Format, ...] = (
    Format("dcp", dcp.recognises, dcp.open_dcp, dcp.owned),
    Format("colossalai", colossalai.recognises, colossalai.open_colossalai, colossalai.owned),
    Format("orbax", orbax.recognises, orbax.open_orbax, orbax.owned),
    Format("torch", torch.recognises, torch.open_torch),
    Format("safetensors", safetensors.recognises, safetensors.open_safetensors, safetensors.owned),
    Format("npz", npz.recognises, npz.open_npz),
    Format("mindspore", mindspore.recognises, mindspore.open_mindspore),
    Format("oneflow", oneflow.recognises, oneflow.open_oneflow, oneflow.owned),
)
"""In the order in which they are asked."""

formats[:] = FORMATS


def strangers(path: str, names: Collection[str]) -> list[str]:
    """The names in a local folder that are not of one checkpoint or of what `convert` writes; all, if there is none.

    What cannot be opened is no checkpoint. A folder of several steps is not one either: who means one of them must not
    lose them all.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            return sorted({*names} - {*_owned(path, names)})
    except (JaxckptError, OSError):
        return sorted(names)


def _owned(path: str, names: Collection[str]) -> Collection[str]:
    if MANIFEST in names:
        load_manifest(store_at(path, Options()))
        return {MANIFEST, *filter(is_data, names)}
    if all(map(is_data, names)):  # a save that never finished
        return names
    if "zarr.json" in names:
        return _owned_by_group(path, names)
    for form in FORMATS:
        if form.recognises(path, names):
            form.open(path)
            return form.owned(path, names)
    return ()


def _owned_by_group(path: str, names: Collection[str]) -> set[str]:
    """The names in a Zarr group that are its own: nodes that have nothing else in their folders."""
    if _node_type(path) != "group":
        return set()
    return {"zarr.json", *(name for name in names if _is_node(os.path.join(path, name)))}


def _is_node(path: str) -> bool:
    kind = _node_type(path)
    names = {*os.listdir(path)} if kind else set[str]()
    return names <= {"zarr.json", "c"} if kind == "array" else kind == "group" and names == _owned_by_group(path, names)


def _node_type(path: str) -> str | None:
    """ "array" or "group", as the zarr.json in a folder says; None if there is none."""
    try:
        with open(os.path.join(path, "zarr.json"), "rb") as file:
            record = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(record, dict) and record.get("zarr_format") == 3  # pyright: ignore[reportUnknownMemberType]
    return record.get("node_type") if known else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
