"""Orbax's format: checkpoints of its handlers and runs of its CheckpointManager."""

from __future__ import annotations

from jaxckpt._formats.orbax.orbax_steps import open_orbax, owned_names, recognizes, run_metadata, steps_in
from jaxckpt._formats.orbax.orbax_write import write_orbax, write_run_metadata, write_step, write_v1
from jaxckpt._sources.format_registry import Format

FORMAT = (
    Format(
        "orbax",
        recognizes,
        open_orbax,
        owned_names,
        write_orbax,
        steps_in=steps_in,
        write_step=write_step,
        run_metadata=run_metadata,
        write_run_metadata=write_run_metadata,
    ),
    # Orbax v1 looks for an item of another name. It also reads the checkpoints of the format "orbax".
    Format(
        "orbax-v1",
        lambda path, names: False,
        write=write_v1,
        write_step=write_v1,
        write_run_metadata=write_run_metadata,
    ),
)
