"""Orbax's format: checkpoints of its handlers and runs of its CheckpointManager."""

from __future__ import annotations

from jaxckpt._formats.orbax.orbax_steps import open_orbax, owned_names, recognizes, steps_in
from jaxckpt._formats.orbax.orbax_write import write_orbax
from jaxckpt._sources.format_registry import Format

FORMAT = Format("orbax", recognizes, open_orbax, owned_names, write_orbax, steps_in=steps_in)
