"""The formats of other libraries that are read as if they were ours."""

from __future__ import annotations

import os
from collections.abc import Collection

from jaxckpt._foreign import colossalai, dcp, mindspore, npz, oneflow, safetensors, torch
from jaxckpt._foreign import orbax_in as orbax
from jaxckpt._format.names import MANIFEST, is_data
from jaxckpt._restore.source import Format, formats

FORMATS: tuple[Format, ...] = (
    Format("dcp", dcp.recognises, dcp.open_dcp),
    Format("colossalai", colossalai.recognises, colossalai.open_colossalai),
    Format("orbax", orbax.recognises, orbax.open_orbax),
    Format("torch", torch.recognises, torch.open_torch),
    Format("safetensors", safetensors.recognises, safetensors.open_safetensors),
    Format("npz", npz.recognises, npz.open_npz),
    Format("mindspore", mindspore.recognises, mindspore.open_mindspore),
    Format("oneflow", oneflow.recognises, oneflow.open_oneflow),
)
"""In the order in which they are asked."""

formats[:] = FORMATS


def holds_checkpoint(path: str, names: Collection[str]) -> bool:
    """Whether a local folder with these names is one checkpoint, of whatever state, or what `convert` makes of one.

    A folder of several steps is not: who means one of them must not lose them all. Nor is one with folders of others.
    """
    if "zarr.json" in names or all(map(is_data, names)):
        return True
    found = next((form.name for form in FORMATS if form.recognises(path, names)), None)
    if found == "orbax":
        return not orbax.has_steps(path, names)
    folders = (name for name in names if not is_data(name) and os.path.isdir(os.path.join(path, name)))
    return (found == "oneflow") or ((found is not None or MANIFEST in names) and not any(folders))
