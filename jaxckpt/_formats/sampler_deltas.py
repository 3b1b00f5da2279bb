"""Weights for the samplers of other libraries: versions of a Hugging Face folder, most of them as differences.

    <directory>/weight_v000001/          a full version: tensors, and the other files of a folder
    <directory>/weight_v000002/          the differences from version 1, in one of three encodings

Encodings "xor" and "overwrite" are those of sglang's pull_weights and of slime: a tensor is a zstd frame of the changed
bytes, and the file's metadata has the Adler-32 checksum of the new tensor. In "sparse", as in TRL and vLLM, `NAME.idx`
has the flat int32 indices of the changed elements, and `NAME.val` their new values.

Each process has the bits of some tensors, whose differences it reads from the publication, through the rules.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jaxckpt._formats.export import StepExport, arrays_of, balanced, n_bytes, report_of, slabs, write_json
from jaxckpt._formats.safetensors import INDEX, tensor_problem, write_tensors
from jaxckpt._job.call import Call
from jaxckpt._model.pieces import Array
from jaxckpt._options import Options
from jaxckpt._rules.rename import renamed_source
from jaxckpt._rules.rule_set import Rules
from jaxckpt._sources.open_source import source_at
from jaxckpt._store.files import remove_folder
from jaxckpt._store.folder import sync_path
from jaxckpt._store.storage_errors import translate_os_errors
from jaxckpt._store.tensors import compress
from jaxckpt.errors import DataError, InputError

Encoding = Literal["xor", "overwrite", "sparse"]

ENCODINGS = ("xor", "overwrite", "sparse")

_MOST_BYTES = {"overwrite": (1 << 32) - 1, "sparse": 1 << 32}
"""Positions of bytes and their count are uint32 in "overwrite", and indices of bfloat16 are int32 in "sparse"."""


_PREFIX = "weight_v"


def version_name(number: int) -> str:
    """The folder of a version."""
    return f"{_PREFIX}{number:06d}"


class SamplerDeltas:
    """Writes the versions. Every process has one, and calls `write` for each publication, in order."""

    def __init__(self, directory: str, encoding: Encoding, rules: Rules | None, base: str | None) -> None:
        self._directory = directory
        self._encoding: Encoding = encoding
        self._rules = rules
        self._base = base
        self._bits: dict[str, Array] = {}
        """The words of the tensors of this process, in the last version."""

        self._version = -1

    def write(self, publication: PublishedVersion, call: Call, checkpoint: str, options: Options) -> None:
        """Write the version of a publication. Every process, in a lane."""
        target = os.path.join(self._directory, version_name(publication.version))
        draft = os.path.join(self._directory, f".{version_name(publication.version)}")
        version, self._version = self._version, -1  # unknown until this one is written
        report = report_of(call)
        with translate_os_errors(f"cannot write {target}"):
            with call.rendezvous("preparing a version of the weights") as rendezvous:
                rendezvous.gather("")
                if call.index == 0:
                    with call.watchdog.operation(f"preparing {target}"):
                        os.makedirs(self._directory, exist_ok=True)
                        for name in os.listdir(self._directory):
                            if name.startswith(f".{_PREFIX}"):  # a draft that failed, or was killed
                                remove_folder(os.path.join(self._directory, name))
                        os.mkdir(draft)
                rendezvous.broadcast("")
            with call.rendezvous("writing a version of the weights") as rendezvous:
                with rendezvous.joined_by_all(), call.watchdog.operation(f"writing {target}"):
                    if not publication.is_full and version != publication.version - 1:
                        raise DataError(f"{target} needs version {publication.version - 1}, found {version}")
                    source = renamed_source(source_at(checkpoint, options), self._rules)
                    arrays = arrays_of(source, options, report, tensor_problem)
                    sizes = {name: n_bytes(data) for name, data in arrays.items()}
                    own = {name: _words(arrays[name]) for name in balanced(sizes, call.index, call.count)}
                    shapes = {name: tuple(arrays[name].shape) for name in own}
                    file = f"model-{call.index + 1:05d}-of-{call.count:05d}.safetensors"
                    names = self._write_own(os.path.join(draft, file), own, shapes, publication)
                    report(0)
                written = rendezvous.gather("\0".join([file, *names]))
                if call.index == 0:
                    with call.watchdog.operation(f"writing {target}"):
                        self._finish(draft, written, publication, sum(sizes.values()))
                        with contextlib.suppress(FileNotFoundError):  # left by a killed job that published it twice
                            shutil.rmtree(target)
                        os.rename(draft, target)
                        sync_path(self._directory)
                        self._delete_before(publication.oldest)
                rendezvous.broadcast("")
        self._version = publication.version

    def _write_own(
        self, path: str, own: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], publication: PublishedVersion
    ) -> list[str]:
        """Write this process's tensors, or their differences. Returns the names in the file."""
        metadata: dict[str, str] = {"format": "pt"}
        tensors: dict[str, Array] = {}
        if any(words.nbytes > _MOST_BYTES.get(self._encoding, words.nbytes) for words in own.values()):
            raise InputError(f'format="{self._encoding}" holds tensors of up to 4 GiB: use format="xor"')
        if publication.is_full:
            self._bits = {name: words.copy() for name, words in own.items()}
            tensors = {name: words.view(ml_dtypes.bfloat16).reshape(shapes[name]) for name, words in own.items()}
        else:
            for name, difference in own.items():
                words = self._bits[name]
                np.bitwise_xor(words, difference, out=words)
                if self._encoding == "sparse":
                    changed = np.flatnonzero(difference)
                    if changed.size:
                        tensors[f"{name}.idx"] = changed.astype("<i4")
                        tensors[f"{name}.val"] = words[changed].view(ml_dtypes.bfloat16)
                elif difference.any():
                    tensors[name] = compress(_encoded(self._encoding, words, difference))
                    metadata[name] = f"{zlib.adler32(words.data):08x}"
        if self._encoding == "sparse":
            metadata |= _patch_metadata(tensors, own, publication)
        if not tensors:
            return []
        write_tensors(path, tensors, metadata)
        sync_path(path)
        return [*tensors]

    def _finish(self, draft: str, written: list[str], publication: PublishedVersion, total: int) -> None:
        """Write the index, and the other files of a full version. Process 0."""
        weight_map = {name: file for file, *names in (text.split("\0") for text in written) for name in names}
        index: dict[str, Any] = {"total_size": total}
        if not publication.is_full:
            index = {
                "version": f"{publication.version:06d}",
                "base_version": f"{publication.version - 1:06d}",
                "delta_encoding": self._encoding,
                "compression_format": "none" if self._encoding == "sparse" else "zstd",
                "checksum_format": "none" if self._encoding == "sparse" else "adler32",
            }
        elif self._base is not None:
            for entry in os.scandir(self._base):
                if entry.is_file() and not entry.name.endswith((".safetensors", INDEX)):
                    shutil.copyfile(entry.path, os.path.join(draft, entry.name))
        write_json(os.path.join(draft, f"model{INDEX}"), {"metadata": index, "weight_map": weight_map})
        for name in os.listdir(draft):
            sync_path(os.path.join(draft, name))
        sync_path(draft)

    def _delete_before(self, oldest: int) -> None:
        for name in os.listdir(self._directory):
            number = name.removeprefix(_PREFIX)
            if number != name and number.isdecimal() and int(number) < oldest:
                remove_folder(os.path.join(self._directory, name))


@dataclass(frozen=True, slots=True)
class PublishedVersion(StepExport):
    """What a `Publisher` publishes, as a step of its own directory."""

    deltas: SamplerDeltas
    version: int
    is_full: bool
    """Whether the step has the weights, and not their differences from the last publication."""

    oldest: int
    """The oldest version that is kept."""

    step: int
    """The training step."""

    def write(self, call: Call, checkpoint: str, options: Options) -> None:
        self.deltas.write(self, call, checkpoint, options)


def require_rules(rules: object) -> Rules | None:
    """Rules that only move elements, because they are also applied to differences. Raises InputError for others."""
    if rules is None:
        return None
    if not isinstance(rules, Rules):
        raise InputError(f"rules must be jaxckpt.rules.Rules, found {type(rules).__name__}")
    for rule in rules.rules:
        computes = rule.dtype or rule.scales or rule.packed or rule.resized or (rule.scale, rule.offset) != (1.0, 0.0)
        if computes:
            raise InputError(
                f"{rule} computes values, and differences can only be moved: apply it to the weights before publish"
            )
    return rules


def _words(data: Any) -> Array:
    """All bfloat16 elements of a tensor, as one-dimensional uint16."""
    if data.dtype != ml_dtypes.bfloat16:
        raise InputError(f"weights are published as bfloat16, but a rule makes {data.dtype}")
    parts = [slab.view(np.uint16) for slab in slabs(data)]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint16), *parts])


def _encoded(encoding: Encoding, words: Array, difference: Array) -> Array:
    """The bytes of a difference, before they are compressed."""
    changed = difference.view(np.uint8)
    if encoding == "xor":
        return changed
    positions = np.flatnonzero(changed).astype("<u4")
    count = np.array([positions.size], "<u4")
    return np.concatenate([count.view(np.uint8), positions.view(np.uint8), words.view(np.uint8)[positions]])


def _patch_metadata(
    tensors: Mapping[str, Array], own: Mapping[str, Array], publication: PublishedVersion
) -> dict[str, str]:
    """TRL's metadata of a patch."""
    total = sum(words.size for words in own.values())
    changed = sum(data.size for name, data in tensors.items() if publication.is_full or name.endswith(".val"))
    return {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": str(not publication.is_full),
        "model_version": str(publication.version),
        "num_changed_params": str(len(own)),
        "total_changed_elements": str(changed),
        "total_elements": str(total),
        "sparsity": repr(1.0 - changed / max(total, 1)),
        "encoding": "raw",
        "step": str(publication.step),
    }
