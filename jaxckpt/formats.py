"""Other libraries' checkpoints that a path alone does not describe, and the interface of additional formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxckpt._formats.eqx import eqx_file as eqx_file
from jaxckpt._formats.mindspore import mindspore_ranks as mindspore_ranks
from jaxckpt._formats.npz import npz_file as npz_file
from jaxckpt._formats.oneflow import oneflow_ranks as oneflow_ranks
from jaxckpt._formats.peft import merge_lora as merge_lora
from jaxckpt._formats.rank_files import rank_files as rank_files
from jaxckpt._formats.step_export import Export as Export
from jaxckpt._keywords import explain_missing_names as _explain_missing_names
from jaxckpt._sources.compose import compose as compose
from jaxckpt._sources.foreign import ArrayData as ArrayData
from jaxckpt._sources.foreign import ForeignArray as ForeignArray
from jaxckpt._sources.foreign import ForeignCheckpoint as ForeignCheckpoint
from jaxckpt._sources.format_registry import ForeignStep as ForeignStep
from jaxckpt._sources.format_registry import Format as Format
from jaxckpt._store.foreign_files import OpenFile as OpenFile
from jaxckpt._store.foreign_files import opened as opened

if not TYPE_CHECKING:  # otherwise type checkers would accept every name
    __getattr__ = _explain_missing_names(__name__)
