"""Saves a tree in a job; each process prints the result of the save."""

from __future__ import annotations

import json

from joined import args
from sharded_tree import make, mesh_of

import jaxckpt

info = jaxckpt.save(args, make(mesh_of(2, 4)))
print(json.dumps({"total": info.total_bytes, "each": info.process_bytes, "sha256": info.manifest_sha256}))
