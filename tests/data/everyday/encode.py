"""Writes expected.json: what the files in this folder hold, in the form that tests/support/recorded.py decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent


def encoded(node: Any) -> Any:
    if isinstance(node, dict):
        return {"dict": [[key, encoded(child)] for key, child in node.items()]}
    if isinstance(node, (list, tuple)):
        return {"tuple" if isinstance(node, tuple) else "list": [encoded(child) for child in node]}
    if isinstance(node, bytes):
        return {"bytes": node.hex()}
    if node is None or type(node) in (bool, int, float, str):
        return node
    array = np.asarray(node)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "hex": array.tobytes().hex()}


def record(found: dict[str, Any]) -> None:
    """Add the content of files, by their names, to expected.json."""
    path = FOLDER / "expected.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known |= {name: encoded(value) for name, value in found.items()}
    path.write_text("{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(known[n])}" for n in sorted(known)) + "\n}\n")
