"""The store of one path: reads and writes bytes, claims and publishes checkpoints, and lists the directory."""

from __future__ import annotations

from typing import Protocol

from jaxckpt._store.child_folders import ChildFolders
from jaxckpt._store.claims import Claims
from jaxckpt._store.objects import Objects


class Store(Objects, Claims, ChildFolders, Protocol):
    """The common interface of `Folder` (file systems) and `Bucket` (object stores)."""
