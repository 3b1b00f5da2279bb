"""Writes the checkpoints in this folder by ColossalAI, and expected.json: the tensors that they hold.

Made with colossalai 0.5.0 (installed without its dependencies), torch 2.13.0+cpu, psutil and Python 3.11.7:

    python make.py FOLDER

Its checkpoint_io imports many modules that are not needed to write these files. Empty modules replace them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

UNUSED = {
    *("accelerate", "apex", "bitsandbytes", "click", "contexttimer", "datasets", "diffusers", "fabric", "fastapi"),
    *("flash_attn", "galore_torch", "google", "ninja", "peft", "pydantic", "ray", "rich", "rpyc", "sentencepiece"),
    *("tensornvme", "tqdm", "transformers", "triton", "uvicorn"),
}


class Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in UNUSED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(Finder())

from colossalai.checkpoint_io import GeneralCheckpointIO  # noqa: E402
from colossalai.interface import OptimizerWrapper  # noqa: E402


def encoded(value: Any) -> Any:
    """A value as JSON that keeps the types of keys and the bits of arrays."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"dtype": str(value.dtype).replace("torch.", ""), "shape": list(value.shape), "hex": raw.hex()}
    if isinstance(value, dict):
        return {"dict": [[key, encoded(child)] for key, child in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [encoded(child) for child in value]}
    return value


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    )
    model.register_buffer("count", torch.tensor(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    hidden = model[1](model[0](torch.randn(2, 8)))
    (hidden.sum() + model[2](hidden.bfloat16()).float().sum()).backward()
    optimizer.step()
    wrapped, files = OptimizerWrapper(optimizer), GeneralCheckpointIO()
    os.makedirs(folder, exist_ok=True)
    small = 200 / 1024**2  # MiB a file, so that there are several
    for name, safe in {"model": False, "model_safetensors": True}.items():
        files.save_model(model, str(folder / name), shard=True, size_per_shard=small, use_safetensors=safe)
    files.save_optimizer(wrapped, str(folder / "optimizer"), shard=True, size_per_shard=small)
    state = encoded(dict(model.state_dict()))
    expected = {"model": state, "model_safetensors": state, "optimizer": encoded(optimizer.state_dict())}
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
