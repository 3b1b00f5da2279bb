"""Saves many kinds of tensors with torch.save into the given folder."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

warnings.filterwarnings("ignore")
folder = Path(sys.argv[1])
base = torch.arange(24.0).reshape(4, 6)
state = {
    "c": base,
    "transposed": base.t(),
    "stepped": base[1::2, ::3],
    "last": base[3],
    "scalar": torch.tensor(7),
    "bfloat16": base.bfloat16(),
    "fp8": base.to(torch.float8_e5m2),
    "uint16": torch.ones(3, dtype=torch.uint16),
    "complex": base.to(torch.complex64),
    "empty": torch.zeros(0, 3),
    "parameter": torch.nn.Parameter(base),
    "expanded": base[0].expand(3, 6),
    "module": torch.nn.Linear(2, 3, dtype=torch.float64).state_dict(),
    "conjugate": base.to(torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "quantized": torch.quantize_per_tensor(base, 0.1, 0, torch.qint8),
    "half complex": base.to(torch.complex32),
    "args": argparse.Namespace(lr=1),
    "step": 3,
    "mixed": {"step": 2, 0: base},
    "names": ["a", ("b", 1.5)],
    "bits": torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32),
    "bomb": torch.zeros(1).expand(1 << 20, 1 << 20),
}
state["module"]["bias"].fill_(2.0)
torch.save(state, folder / "state.pt")
torch.save({"c": base}, folder / "small.pt")
torch.save({f"p{n}": torch.full((16,), float(n)) for n in range(4)}, folder / "several.pt")
torch.serialization.set_crc32_options(False)
torch.save({"c": base}, folder / "no crc.pt")
torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
with (folder / "within").open("wb") as file:
    file.write(b"before")
with (folder / "within").open("ab") as file:
    file.write((folder / "state.pt").read_bytes() + b"after")
