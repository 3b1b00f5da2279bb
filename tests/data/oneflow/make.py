"""Writes the checkpoints in this folder by OneFlow itself, and expected.json: what OneFlow loads from them.

Made with OneFlow 0.9.0 (its newest release on PyPI), NumPy 1.23.5 and Python 3.9.18:

    python make.py single FOLDER
    python -m oneflow.distributed.launch --nproc_per_node 4 make.py ranks FOLDER

The wheel needs the libraries of CUDA 11 and cuDNN 8 to be loaded. This script does not call them: without a GPU,
empty libraries of those names are enough.

graph/ was not written by this script: a graph needs a GPU. OneFlow 0.9.0 wrote it in its own example of a graph that
four ranks run in stages. Each of two ranks saved its half of each tensor; loaded.npz is what OneFlow loads.
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow


def encoded(value: Any) -> Any:
    """A value as JSON that keeps the types of keys and the bits of arrays."""
    if isinstance(value, flow.Tensor):
        array = value.numpy()  # of bfloat16: float32
        return {
            "dtype": str(value.dtype).replace("oneflow.", ""),
            "shape": list(array.shape),
            "hex": array.tobytes().hex(),
        }
    if isinstance(value, (np.ndarray, np.generic)):
        return {"dtype": value.dtype.name, "shape": list(value.shape), "hex": value.tobytes().hex()}
    if isinstance(value, dict):
        return {"dict": [[key, encoded(child)] for key, child in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [encoded(child) for child in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    return value


def single(folder: Path) -> None:
    flow.manual_seed(0)
    model = flow.nn.Sequential(flow.nn.Linear(4, 3), flow.nn.BatchNorm1d(3))
    saved: dict[str, Any] = {}
    for name, optimizer in {
        "sgd": flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adam": flow.optim.Adam(model.parameters(), lr=0.1),
    }.items():
        for _ in range(2):
            optimizer.zero_grad()
            model(flow.randn(5, 4)).square().sum().backward()
            optimizer.step()
        saved[name] = optimizer.state_dict()
    saved["model"] = model.state_dict()
    values = flow.tensor(np.arange(-3, 3, dtype=np.float64).reshape(2, 3) / 3)
    dtypes = "float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool"
    saved["dtypes"] = {name: values.to(getattr(flow, name)) for name in dtypes}
    saved["dtypes"] |= {"scalar": flow.tensor(3.5), "empty": flow.zeros(0, 3), "transposed": values.t()}
    saved["bfloat16"] = {"w": values.to(flow.bfloat16)}
    saved["python"] = {
        "tuple": (1, 2.5, "x", b"y", None, True),
        "list": [flow.nn.Parameter(values[0]), np.arange(3), np.float32(2)],
        "ordered": OrderedDict(b=1, a=2),
    }
    expected: dict[str, Any] = {}
    for name, value in saved.items():
        flow.save(value, folder / name)
        # OneFlow 0.9.0 saves bfloat16, but cannot load it.
        expected[name] = encoded(value if name == "bfloat16" else flow.load(folder / name))
    variables = folder / "variables"
    for name, tensor in saved["model"].items():  # like the variables of a graph, which needs a GPU
        flow.framework.check_point_v2._save_tensor_to_disk(tensor, variables / name)
    (variables / "snapshot_done").touch()
    expected["variables"] = encoded(flow.load(variables))
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))


def ranks(folder: Path) -> None:
    rank, cpu = flow.env.get_rank(), flow.placement("cpu", [0, 1, 2, 3])
    split, broadcast = flow.sbp.split, flow.sbp.broadcast
    weight = flow.tensor(np.arange(32, dtype=np.float32).reshape(8, 4) / 7)
    tensors = {
        "rows": weight.to_global(cpu, broadcast).to_global(sbp=split(0)),
        "columns": weight.to_global(cpu, broadcast).to_global(sbp=split(1)),
        "both": weight.to_global(flow.placement("cpu", [[0, 1], [2, 3]]), [broadcast, broadcast]).to_global(
            sbp=[split(0), split(1)]
        ),
        "whole": weight.to_global(cpu, broadcast),
        "sum": flow.full((2,), rank + 0.5).to_global(cpu, flow.sbp.partial_sum),
        "count": flow.tensor([2**40]).to_global(cpu, broadcast),
    }
    flow.save({"state": tensors, "step": 3}, folder / "global", global_dst_rank=0)
    local = {name: tensor.to_local() for name, tensor in tensors.items() if name != "sum"}
    flow.save({"state": local, "step": 3}, folder / f"rank{rank}")
    loaded = flow.load(folder / "global", global_src_rank=0)
    found = {name: tensor.to_global(cpu, broadcast).to_local() for name, tensor in loaded["state"].items()}
    if rank == 0:
        expected = json.loads((folder / "expected.json").read_text())
        expected["global"] = encoded({"state": found, "step": loaded["step"]})
        (folder / "expected.json").write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    what, path = sys.argv[1], Path(sys.argv[2])
    os.makedirs(path, exist_ok=True)
    {"single": single, "ranks": ranks}[what](path)
