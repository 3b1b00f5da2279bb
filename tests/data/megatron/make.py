"""Writes the checkpoint in this folder by Megatron Core's dist_checkpointing, on two ranks.

Made with megatron-core 0.16.1 (installed without its dependencies), torch 2.13.0+cpu and Python 3.11.7:

    python make.py FOLDER
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def main(rank: int, folder: str) -> None:
    for name, value in {"synchronize": None, "empty_cache": None, "current_device": "cpu"}.items():
        setattr(torch.cuda, name, lambda *args, value=value: value)  # Megatron Core calls CUDA even without a GPU
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713", "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    rows = torch.arange(32.0).reshape(8, 4)[4 * rank : 4 * rank + 4].contiguous()
    bias, layer = torch.arange(4.0).bfloat16(), torch.full((3,), float(rank))
    make = ShardedTensor.from_rank_offsets
    state = {
        "model": {
            "weight": make("decoder.weight", rows, (0, rank, RANKS)),
            "bias": make("decoder.bias", bias, replica_id=rank),
            "layer": make("decoder.layers.norm", layer, (0, rank, RANKS), prepend_axis_num=1),
            "extra": ShardedObject("decoder.layers.extra_state", {"scale": torch.ones(2)}, (RANKS,), (rank,)),
        },
        "args": argparse.Namespace(lr=0.1, params_dtype=torch.bfloat16),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "step": torch.tensor(3)},
    }
    dist_checkpointing.save(state, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.makedirs(sys.argv[1])
    mp.spawn(main, args=(sys.argv[1],), nprocs=RANKS)
