"""Orbax's format: checkpoints of its handlers and runs of its CheckpointManager."""

from __future__ import annotations

from jaxckpt._foreign.orbax.steps import open_orbax, owned_names, recognizes, steps_in
from jaxckpt._foreign.orbax.write import write_orbax
from jaxckpt._sources.formats import Format

FORMAT = Format("orbax", recognizes, open_orbax, owned_names, write_orbax, steps_in=steps_in)
