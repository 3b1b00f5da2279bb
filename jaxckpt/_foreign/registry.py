"""The table of foreign formats: a format is a module that reads or writes it, and a row here."""

from __future__ import annotations

from jaxckpt._foreign import colossalai, dcp, mindspore, npz, oneflow, safetensors, torch, zarr_group
from jaxckpt._foreign.orbax import steps as orbax
from jaxckpt._foreign.orbax.write import write_orbax
from jaxckpt._restore.source import ForeignFormat, formats

FORMATS: tuple[ForeignFormat, ...] = (
    ForeignFormat("zarr", zarr_group.recognizes, None, zarr_group.owned_names, zarr_group.write_zarr, (".zarr",)),
    ForeignFormat("dcp", dcp.recognizes, dcp.open_dcp, dcp.owned_names),
    ForeignFormat("colossalai", colossalai.recognizes, colossalai.open_colossalai, colossalai.owned_names),
    ForeignFormat("orbax", orbax.recognizes, orbax.open_orbax, orbax.owned_names, write_orbax, steps_in=orbax.steps_in),
    ForeignFormat("torch", torch.recognizes, torch.open_torch),
    ForeignFormat(
        "safetensors",
        safetensors.recognizes,
        safetensors.open_safetensors,
        safetensors.owned_names,
        safetensors.write_safetensors,
        (".safetensors",),
    ),
    ForeignFormat("npz", npz.recognizes, npz.open_npz, write=npz.write_npz, suffixes=(".npz",)),
    ForeignFormat("mindspore", mindspore.recognizes, mindspore.open_mindspore),
    ForeignFormat("oneflow", oneflow.recognizes, oneflow.open_oneflow, oneflow.owned_names),
)
"""Formats in the order of detection."""

WRITERS = {form.name: form.write for form in FORMATS if form.write is not None}
"""Names of the foreign formats that `convert` writes."""

WRITTEN = ("jaxckpt", *sorted(WRITERS))
"""Values of `convert(format=)`."""

BY_SUFFIX = {suffix: form.name for form in FORMATS for suffix in form.suffixes}
"""The default format of `convert` for each suffix."""

formats[:] = [form for form in FORMATS if form.open is not None]
