"""Writes the checkpoints in this folder by MindSpore, and expected.json: what was saved.

Made with MindSpore 2.10.0, NumPy 1.26.4 and Python 3.11.7, on a CPU:

    python make.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

REAL = "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"


def encoded(tensor: Tensor) -> dict[str, Any]:
    array = (tensor.astype(ms.float32) if tensor.dtype == ms.bfloat16 else tensor).asnumpy()
    dtype = "bfloat16" if tensor.dtype == ms.bfloat16 else array.dtype.name
    return {"dtype": dtype, "shape": list(array.shape), "hex": array.tobytes().hex()}


def main(folder: Path) -> None:
    os.makedirs(folder, exist_ok=True)
    values = np.arange(-3, 3, dtype=np.float32).reshape(2, 3) / 3
    tensors = {name: Tensor(values).astype(getattr(ms, name)) for name in REAL}
    tensors |= {"bool": Tensor(values > 0), "scalar": Tensor(3.5, ms.float32), "a/b.c": Tensor(values)}
    extra = {"epoch": 3, "rate": 0.5, "flag": True, "name": "x"}
    parameters = [{"name": name, "data": tensor} for name, tensor in tensors.items()]
    ms.save_checkpoint(parameters, str(folder / "dtypes.safetensors"), format="safetensors")
    expected = {"dtypes.safetensors": {name: encoded(tensor) for name, tensor in tensors.items()}}
    tensors["complex"] = Tensor((values + 1j).astype(np.complex64))
    parameters.append({"name": "complex", "data": tensors["complex"]})
    ms.save_checkpoint(parameters, str(folder / "dtypes.ckpt"), append_dict=extra)
    expected["dtypes.ckpt"] = {name: encoded(tensor) for name, tensor in tensors.items()} | extra
    ms.set_seed(0)
    net = nn.Dense(4, 3)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.Adam(net.trainable_params(), 0.1))
    step(Tensor(np.ones((2, 4), np.float32)), Tensor(np.ones((2, 3), np.float32)))
    ms.save_checkpoint(step, str(folder / "adam.ckpt"), crc_check=True)
    loaded = ms.load_checkpoint(str(folder / "adam.ckpt"), crc_check=True)
    expected["adam.ckpt"] = {name: encoded(tensor) for name, tensor in loaded.items()}
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
