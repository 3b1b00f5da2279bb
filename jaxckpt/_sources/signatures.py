"""Names files and folders that are not checkpoints, or whose format is not read, by their first bytes and names.

One table, which every error about an unknown or damaged file uses.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Mapping

from jaxckpt._store.foreign_files import opened, store_of
from jaxckpt.errors import DataError, StorageError

_HEAD_BYTES = 512

_POINTER = "is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository, or download the file again"
_COMPRESSED = "is compressed with {}: decompress it first"
_MESSAGE = "is the error message of a server, in place of the file: download it again, perhaps after a login"
_PAGE = "is an HTML page, from a failed download: it may need a login, or another URL"
_FIRST_BYTES: Mapping[bytes, str] = {
    b"version https://git-lfs.github.com/spec/": _POINTER,
    b"GGUF": "is a GGUF file of llama.cpp: open the model's original safetensors instead",
    b"\x1f\x8b": _COMPRESSED.format("gzip"),
    b"BZh": _COMPRESSED.format("bzip2"),
    b"\xfd7zXZ\0": _COMPRESSED.format("xz"),
    b"\x28\xb5\x2f\xfd": _COMPRESSED.format("zstd"),
    b"PAR1": "is a Parquet table, which holds no tree of arrays",
    b"MATLAB 5.0": "is a MATLAB file: load it with scipy.io.loadmat, and save the arrays",
    b"<!doctype html": _PAGE,
    b"<html": _PAGE,
    b"<?xml": "is an XML text, such as the error of an object store: download the file again",
    b"7z\xbc\xaf\x27\x1c": _COMPRESSED.format("7-Zip"),
    b"Rar!": _COMPRESSED.format("RAR"),
    b'{"error"': _MESSAGE,
    b"entry not found": _MESSAGE,
    b"repository not found": _MESSAGE,
    b"invalid username or password": _MESSAGE,
    b"access to model": _MESSAGE,
    b"access denied": _MESSAGE,
    b"\0" * 16: "begins with zeros, as a download or copy that never finished: download or copy it again",
}
"""What a file is, by its first bytes in lowercase or as they are."""

_NAMES: Mapping[str, str] = {
    "*.onnx": "is an ONNX model: export the original model's weights as safetensors, or read it with the onnx package",
    "*.nemo": "is an archive of NVIDIA NeMo: extract it with tar, and open the weights in it",
    "*.tflite": "is a TensorFlow Lite model, which holds no tree of arrays",
    "*.data-?????-of-?????": "is a part of a TensorFlow checkpoint: {tensorflow}",
    "*.index": "is the index of a TensorFlow checkpoint: {tensorflow}",
    "saved_model.pb": "is a SavedModel of TensorFlow: {tensorflow}",
    "*.tar": "is a tar archive: extract it, and open what it holds",
    "*.part": "is an unfinished download: complete it",
    "*.incomplete": "is an unfinished download: complete it",
    "*.crdownload": "is an unfinished download: complete it",
    "config.json": "describes a model, without its weights: give the path of its folder",
    "model_index.json": "describes a pipeline of models: open the folder of one of them, next to it",
    "manifest.json": "is a part of a checkpoint: give the path of its folder",
    "_METADATA": "is a part of a checkpoint of Orbax: give the path of its folder",
    "_CHECKPOINT_METADATA": "is a part of a checkpoint of Orbax: give the path of its folder",
    "*.weights.json": "is the index of Keras's sharded weights: save them without max_shard_size",
    "*.distcp": "is a part of a checkpoint of torch.distributed.checkpoint: give the path of its folder",
    "zarr.json": "is a part of a Zarr array or group: give the path of its folder",
}
"""What a file is, by its name."""

_INSIDE: Mapping[str, str] = {
    "*.index": "is a folder with a TensorFlow checkpoint: {tensorflow}",
    "saved_model.pb": "is a SavedModel of TensorFlow: {tensorflow}",
    "*_model_states.pt": "{deepspeed}",
    "*_optim_states.pt": "{deepspeed}",
    "zero_to_fp32.py": "{deepspeed}",
    "*.nemo": "is a folder of NVIDIA NeMo: extract the .nemo file with tar, and open the weights in it",
    "*.onnx": "is a folder with an ONNX model: export the original model's weights as safetensors",
    "*.gguf": "is a folder with a GGUF file of llama.cpp: open the model's original safetensors instead",
}
"""What a folder is, by a name in it."""

_ADVICE = {
    "tensorflow": "read its variables with tf.train.load_checkpoint, and save them with jaxckpt.save",
    "deepspeed": "is a checkpoint of DeepSpeed: its script zero_to_fp32.py writes a file that jaxckpt reads",
}


def describe(path: str, names: Collection[str]) -> str | None:
    """What a file or folder is, and the way out; None if that is not known. `names` are those in the folder.

    Of a folder, only the names are looked at, and the first bytes of files, which may be pointers or failed downloads.
    """
    if not names:
        return _describe_file(path)
    # Each takes a request in a bucket.
    n_looked_at = 1000 if store_of(path) is None else 3
    for name in sorted(names, key=lambda name: (not name.endswith(_WEIGHTS), name))[:n_looked_at]:
        what = _by_first_bytes(_head(f"{path}/{name}") or b"")
        if what == _POINTER:
            return f"has Git LFS pointers in place of files, such as {name}: run `git lfs pull` in its repository"
        if what in (_PAGE, _MESSAGE):
            return f"holds {name}, which {what}"
    return _by_name(names, _INSIDE)


_WEIGHTS = (".safetensors", ".bin", ".msgpack", ".pt", ".pth", ".h5")
"""The suffixes of files that are looked at first."""


def _describe_file(path: str) -> str | None:
    head = _head(path)
    if head is None:
        return None
    if not head:
        return "is empty"
    if meaning := _by_first_bytes(head):
        return meaning
    if head[257:262] == b"ustar":
        return _NAMES["*.nemo" if path.endswith(".nemo") else "*.tar"]
    return _by_name([os.path.basename(path)], _NAMES)


def _by_first_bytes(head: bytes) -> str | None:
    text = head.lstrip().lower()
    starts = (start for start in _FIRST_BYTES if head.startswith(start) or text.startswith(start))
    return _FIRST_BYTES.get(next(starts, b""))


def describe_unknown(path: str) -> str:
    """What a file is that no format recognizes, and that `describe` does not know."""
    head = _head(path) or b""
    if head.startswith(b"PK"):
        return "is a zip archive in no format that jaxckpt reads: extract it, and open what it holds"
    return f"is a file in no format that jaxckpt reads; it begins with {head[:16]!r}"


def describe_content(names: Collection[str]) -> str:
    """What a folder holds that is no checkpoint, and in which no checkpoint is found."""
    if "config.json" in names:
        return "has the config.json of a model, but no weights: download them too"
    held = sorted(names)
    return f"has no manifest.json, and no file of another library's format: it holds {', '.join(held[:5])}" + (
        f" and {len(held) - 5} more" if len(held) > 5 else ""
    )


def _by_name(names: Collection[str], table: Mapping[str, str]) -> str | None:
    meanings = (meaning for pattern, meaning in table.items() if fnmatch.filter(names, pattern))
    meaning = next(meanings, None)
    return meaning and meaning.format_map(_ADVICE)


def _head(path: str) -> bytes | None:
    """The first bytes of a file; None if it cannot be read."""
    try:
        with opened(path) as file:
            return file.read(_HEAD_BYTES, 0)
    except (DataError, StorageError):
        return None
