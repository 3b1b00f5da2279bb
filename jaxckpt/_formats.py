"""Which format a checkpoint is in: ours, or one of those that are read as if they were."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from jaxckpt import _colossalai as colossalai
from jaxckpt import _dcp as dcp
from jaxckpt import _manifest as manifests
from jaxckpt import _mindspore as mindspore
from jaxckpt import _npz as npz
from jaxckpt import _oneflow as oneflow
from jaxckpt import _orbax as orbax
from jaxckpt import _safetensors as safetensors
from jaxckpt import _torch as torch
from jaxckpt._errors import NotACheckpointError
from jaxckpt._options import Options
from jaxckpt._place import local_path, store_at
from jaxckpt._source import Foreign, Native
from jaxckpt._store import is_data

Location = str | os.PathLike[str] | Foreign
"""Where a checkpoint is: a path or URL, or what a function such as `jaxckpt.rank_files` has made of several files."""


@dataclass(frozen=True, slots=True)
class Format:
    """A foreign format that tells its own global layout."""

    name: str

    recognises: Callable[[str, Collection[str]], bool]
    """Whether a local path is one, from the names in its folder; none where it is a file."""

    open: Callable[[str], Native | Foreign]


FORMATS: tuple[Format, ...] = (
    Format("dcp", dcp.recognises, dcp.open_dcp),
    Format("colossalai", colossalai.recognises, colossalai.open_colossalai),
    Format("orbax", orbax.recognises, orbax.open_orbax),
    Format("torch", torch.recognises, torch.open_torch),
    Format("safetensors", safetensors.recognises, safetensors.open_safetensors),
    Format("npz", npz.recognises, npz.open_npz),
    Format("mindspore", mindspore.recognises, mindspore.open_mindspore),
    Format("oneflow", oneflow.recognises, oneflow.open_oneflow),
)
"""In the order in which they are asked."""


def source_at(location: Location, options: Options) -> tuple[Native | Foreign, str]:
    """What can be read at a location, and a digest of all that is known of it without reading its arrays.

    Raises NotACheckpointError, ManifestError; DataError where a foreign checkpoint is damaged.
    """
    if isinstance(location, Foreign):
        return location, _digest(location)
    store = store_at(location, options)
    try:
        manifest, content = manifests.load(store, options.manifest_sha256)
    except NotACheckpointError:
        # Who expects a certain manifest does not mean a checkpoint that has none.
        found = None if options.manifest_sha256 else _foreign(location)
        if found is None:
            raise
        return found, _digest(found)
    return Native(store, manifest), hashlib.sha256(content).hexdigest()


def _foreign(location: str | os.PathLike[str]) -> Native | Foreign | None:
    """A checkpoint of another library at a local path."""
    path = local_path(location)
    if path is None:
        return None
    try:
        names = os.listdir(path)
    except NotADirectoryError:
        names = []
    except OSError:  # it was not there, or not to be read, for ours either
        return None
    return next((form.open(path) for form in FORMATS if form.recognises(path, names)), None)


def holds_checkpoint(path: str, names: Collection[str]) -> bool:
    """Whether a local folder with these names is one checkpoint, of whatever state, or what `convert` makes of one.

    A folder of several steps is not: who means one of them must not lose them all. Nor is one with folders of others.
    """
    if "zarr.json" in names or all(map(is_data, names)):
        return True
    found = next((form.name for form in FORMATS if form.recognises(path, names)), None)
    if found == "orbax":
        return not orbax.has_steps(path, names)
    folders = (name for name in names if not is_data(name) and os.path.isdir(os.path.join(path, name)))
    return (found == "oneflow") or ((found is not None or manifests.MANIFEST in names) and not any(folders))


def _digest(source: Native | Foreign) -> str:
    return hashlib.sha256(msgspec.json.encode(source.manifest)).hexdigest()
