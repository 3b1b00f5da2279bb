"""Steps in a run's directory: how their folders are named, and which of them hold a checkpoint."""

from __future__ import annotations

import re

from jaxckpt._format.records import LARGEST
from jaxckpt._runtime.options import whole_number
from jaxckpt._storage.store import Store


def require_step(step: object) -> int:
    """The number of a step as a plain int. Raises InputError for anything else."""
    return whole_number(step, "step", least=0, most=LARGEST)


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"{step:08d}"


def is_step(name: str) -> bool:
    """Whether a name is that of a step's folder."""
    # A number with more digits could be beyond the largest step: it would stay the newest for ever.
    return re.fullmatch(r"\d{8}|[1-9]\d{8,18}", name, re.ASCII) is not None and int(name) <= LARGEST


def step_folders(directory: Store) -> tuple[list[int], list[int]]:
    """The steps whose folder holds a checkpoint, and those whose folder holds none, oldest first, by one listing."""
    found = sorted((int(name), published) for name, published in directory.folders().items() if is_step(name))
    return [step for step, published in found if published], [step for step, published in found if not published]
