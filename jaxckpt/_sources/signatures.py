"""Names files and folders that are not checkpoints, or whose format is not read, by their first bytes and names.

One table, which every error about an unknown or damaged file uses.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Mapping

from jaxckpt._store.foreign_files import is_visible_file, opened, store_of
from jaxckpt.errors import DataError, StorageError

_HEAD_BYTES = 512

_POINTER = "is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository, or download the file again"
_COMPRESSED = "is compressed with {}: decompress it first"
_FIRST_BYTES: Mapping[bytes, str] = {
    b"version https://git-lfs.github.com/spec/": _POINTER,
    b"GGUF": "is a GGUF file of llama.cpp: open the model's original safetensors instead",
    b"\x1f\x8b": _COMPRESSED.format("gzip"),
    b"BZh": _COMPRESSED.format("bzip2"),
    b"\xfd7zXZ\0": _COMPRESSED.format("xz"),
    b"\x28\xb5\x2f\xfd": _COMPRESSED.format("zstd"),
    b"PAR1": "is a Parquet table, which holds no tree of arrays",
    b"MATLAB 5.0": "is a MATLAB file: load it with scipy.io.loadmat, and save the arrays",
    b"<!doctype html": "is an HTML page, from a failed download: it may need a login, or another URL",
    b"<html": "is an HTML page, from a failed download: it may need a login, or another URL",
    b"<?xml": "is an XML text, such as the error of an object store: download the file again",
    b'{"error"': "is the error message of a server: download the file again",
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

    Of a folder, only the names are looked at, and the heads of small files, which may be pointers.
    """
    if not names:
        return _describe_file(path)
    # Each takes a request in a bucket.
    n_looked_at = 1000 if store_of(path) is None else 3
    pointers = [name for name in sorted(names)[:n_looked_at] if _head(f"{path}/{name}", 1024).startswith(_LFS)]
    if pointers:
        return f"has Git LFS pointers in place of files, such as {pointers[0]}: run `git lfs pull` in its repository"
    return _by_name(names, _INSIDE)


_LFS = b"version https://git-lfs"


def _describe_file(path: str) -> str | None:
    head = _head(path)
    if not head and is_visible_file(path):
        return "is empty"
    text = head.lstrip()
    for start, meaning in _FIRST_BYTES.items():
        if head.startswith(start) or text.lower().startswith(start):
            return meaning
    if head[257:262] == b"ustar":
        return _NAMES["*.nemo" if path.endswith(".nemo") else "*.tar"]
    return _by_name([os.path.basename(path)], _NAMES)


def first_bytes(path: str) -> str:
    """The first bytes of a file, for an error."""
    return repr(_head(path)[:16])


def _by_name(names: Collection[str], table: Mapping[str, str]) -> str | None:
    found = (meaning for pattern, meaning in table.items() if fnmatch.filter(names, pattern))
    meaning = next(found, None)
    return meaning and meaning.format_map(_ADVICE)


def _head(path: str, longest: int | None = None) -> bytes:
    """The first bytes of a file of at most `longest` bytes; none if it cannot be read."""
    try:
        with opened(path) as file:
            return b"" if longest is not None and file.read(1, longest) else file.read(_HEAD_BYTES, 0)
    except (DataError, StorageError):
        return b""
