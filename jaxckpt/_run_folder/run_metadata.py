"""Metadata of a run: one JSON object that describes the whole run, in a small file that is written once."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from jaxckpt._model.manifest import MAX_NESTING, nesting
from jaxckpt._run_folder.steps import METADATA, RUN
from jaxckpt._store.store import Store
from jaxckpt.errors import DataError


def encode_metadata(metadata: dict[str, Any]) -> bytes:
    """Metadata as the content of the file."""
    return json.dumps(metadata, ensure_ascii=False).encode()


def read_metadata(run: Store) -> dict[str, Any] | None:
    """The metadata of a run; None if it has none. Raises DataError, StorageError."""
    note = run.read(f"{RUN}/{METADATA}")
    if note is None:
        return None
    try:
        if nesting(note) > MAX_NESTING:
            raise ValueError(f"nested deeper than {MAX_NESTING}")
        return msgspec.json.decode(note, type=dict[str, Any])
    except ValueError as error:
        raise DataError(f"{run.url}/{RUN}/{METADATA}, the metadata of the run, is damaged: {error}") from error
