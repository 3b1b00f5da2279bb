"""A reader of the versions that samplers of other libraries follow, written from their specifications."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
from numcodecs.zstd import Zstd


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(tensors, metadata) of a file; bfloat16 as uint16."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    dtypes = {"BF16": "<u2", "U8": "u1", "I32": "<i4"}
    found: dict[str, np.ndarray] = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(content[start:end], dtypes[entry["dtype"]]).reshape(entry["shape"])
    return found, metadata


class Sampler:
    """The weights of one sampler."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.version = 0
        self.words: dict[str, np.ndarray] = {}

    def newest(self) -> int:
        return max((int(path.name[8:]) for path in self._directory.glob("weight_v*")), default=0)

    def pull(self, target: int) -> None:
        """Bring the weights to a version: from the newest full version, or from the own one, by the differences."""
        start = target
        while start > self.version and self._metadata(start).get("delta_encoding"):
            start -= 1
        if start > self.version:
            self.words = {}
            for file in self._folder(start).glob("*.safetensors"):
                self.words |= {name: tensor.copy() for name, tensor in read_safetensors(file)[0].items()}
        for version in range(max(start, self.version) + 1, target + 1):
            self._apply(version)
        self.version = target

    def _folder(self, version: int) -> Path:
        return self._directory / f"weight_v{version:06d}"

    def _metadata(self, version: int) -> dict[str, str]:
        return json.loads((self._folder(version) / "model.safetensors.index.json").read_bytes())["metadata"]

    def _apply(self, version: int) -> None:
        metadata = self._metadata(version)
        assert (int(metadata["version"]), int(metadata["base_version"])) == (version, version - 1)
        for file in self._folder(version).glob("*.safetensors"):
            tensors, sums = read_safetensors(file)
            if metadata["delta_encoding"] == "sparse":
                for name in {name[:-4] for name in tensors}:
                    self.words[name].reshape(-1)[tensors[f"{name}.idx"]] = tensors[f"{name}.val"]
                continue
            assert (metadata["compression_format"], metadata["checksum_format"]) == ("zstd", "adler32")
            for name, packed in tensors.items():
                delta = np.frombuffer(Zstd().decode(packed.tobytes()), np.uint8)
                state = self.words[name].reshape(-1).view(np.uint8)
                if metadata["delta_encoding"] == "xor":
                    state ^= delta
                else:
                    count = int(delta[:4].view("<u4")[0])
                    state[delta[4 : 4 + 4 * count].view("<u4")] = delta[4 + 4 * count :]
                if f"{zlib.adler32(state):08x}" != sums[name]:
                    raise ValueError(f"{name} has another checksum in version {version}")

    def tensors(self) -> dict[str, np.ndarray]:
        return {name: words.view(ml_dtypes.bfloat16) for name, words in self.words.items()}
