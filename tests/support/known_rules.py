"""A run whose last Checkpointer had the same rules as the next one, which therefore deletes steps without a notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxckpt._options import Options
from jaxckpt._runs.deletion import ExistingSteps
from jaxckpt._runs.retention import RetentionPolicy
from jaxckpt._store.store_path import run_at


def know_rules(directory: str | Path, **rules: Any) -> None:
    """Note in a run that its last Checkpointer had these rules."""
    ExistingSteps(run_at(directory, Options()), RetentionPolicy.of(**rules), keep=False).record()
