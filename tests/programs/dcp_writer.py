"""Real checkpoints of torch.distributed.checkpoint, from gloo jobs. Run by test_dcp.py, which does not import torch.

    python dcp_writer.py FOLDER PROCESSES...

Runs one job for each number of processes, in the folder FOLDER/PROCESSES. Next to each checkpoint, rank 0 writes the
expected content: an .npz file with the bytes of each global tensor, by path. Each process is a fork, so that torch is
imported only once.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


def bits(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, which include NaNs."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if dtype == torch.bool:
        raw &= 1
    return torch.from_numpy(raw).view(dtype).squeeze(-1)


def spread(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """Make a DTensor without communication, because gloo supports few dtypes."""
    found = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    found.whole = whole
    return found


def expect(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the expected content. full_tensor is a collective, so every rank must call this."""
    whole = {
        name: t.whole if hasattr(t, "whole") else t.full_tensor() if isinstance(t, DTensor) else t
        for name, t in tensors.items()
    }
    if dist.get_rank() == 0:
        found = {}
        for name, tensor in whole.items():
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            found[f"{str(tensor.dtype).removeprefix('torch.')}:{','.join(map(str, tensor.shape))}:{name}"] = flat
        np.savez(path, **found)


def flat(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found: dict[str, torch.Tensor] = {}
    for key, child in items:
        found |= flat(child, f"{path}/{key}" if path else str(key))
    return found


def of_dtensors(folder: Path, count: int) -> None:
    """Every dtype, every placement, unusual layouts in memory, and Python objects."""
    mesh = init_device_mesh("cpu", (count,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y")) if count == 4 else None
    full = bits(1, (24, 12), torch.float32)
    wide = bits(2, (8, 6), torch.float32)
    state: dict[str, Any] = {
        "dtypes": {str(d).removeprefix("torch."): spread(bits(3, (24, 12), d), mesh, [Shard(0)]) for d in DTYPES},
        "rows": spread(full, mesh, [Shard(0)]),
        "columns": spread(full, mesh, [Shard(1)]),
        "replicated": spread(full, mesh, [Replicate()]),
        "uneven": spread(bits(4, (7, 5), torch.bfloat16), mesh, [Shard(0)]),
        "few": spread(bits(5, (3,), torch.float32), mesh, [Shard(0)]),
        "plain": {
            "transposed": wide.t(),
            "stepped": wide[1:7:2, ::3],
            "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
            "empty": torch.zeros(0, 4),
            "parameter": nn.Parameter(wide),
        },
        "layers": [{"w": bits(6, (4, 4), torch.float32)}, {"w": bits(7, (4, 4), torch.float32)}],
        "step": 7,
        "lr": 1e-3,
        "name": "run/1",
        "betas": (0.9, 0.999),
        "schedule": [1, 2, 3],
        "nothing": None,
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "opaque": Path("/tmp"),
    }
    if square is not None:
        state["square"] = {
            "both": spread(full, square, [Shard(0), Shard(1)]),
            "rows of rows": spread(full, square, [Shard(0), Shard(0)]),
            "copies": spread(full, square, [Replicate(), Shard(1)]),
        }
    dcp.save(state, checkpoint_id=folder / "dtensors")
    expect(folder / "dtensors.npz", flat(state))


def of_training(folder: Path, count: int) -> None:
    """A model under FSDP2 and its optimizer, after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.LayerNorm(24), nn.Linear(24, 6))
    mesh = init_device_mesh("cpu", (count,))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.ones(4, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 2}
    dcp.save(state, checkpoint_id=folder / "training")
    expect(folder / "training.npz", flat(state))


def of_safetensors(folder: Path, count: int) -> None:
    """Shards in safetensors files."""
    mesh = init_device_mesh("cpu", (count,))
    state = {
        "model.rows": spread(bits(1, (24, 12), torch.bfloat16), mesh, [Shard(0)]),
        "model.columns": spread(bits(2, (24, 12), torch.float32), mesh, [Shard(1)]),
        "model.whole": bits(3, (5,), torch.float32),
    }
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(folder / "safetensors"), save_distributed=True))
    expect(folder / "safetensors.npz", flat(state))


def job(count: int, folder: Path) -> None:
    """Run a job of `count` processes. Raises if one of them fails."""
    folder.mkdir()
    ranks = [fork(rank, count, folder) for rank in range(count)]
    failed = [rank for rank, child in enumerate(ranks) if os.waitpid(child, 0)[1]]
    assert not failed, f"ranks {failed} of {count} failed"


def fork(rank: int, count: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=count)
        for write in (of_dtensors, of_training, of_safetensors):
            write(folder, count)
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)  # on a normal exit, gloo's threads sometimes abort the process
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    for number in map(int, sys.argv[2:]):
        job(number, Path(sys.argv[1], str(number)))
