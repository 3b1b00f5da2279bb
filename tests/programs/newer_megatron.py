"""Saves like Megatron Core without common.pt: the common state is an object with one shard, in a list."""

from __future__ import annotations

import sys

import torch
import torch.distributed.checkpoint as dcp

state = {"weight": torch.ones(2), "common_state/shard_0_1": [{"iteration": 7, "optimizer": {"lr": 0.1}}]}
dcp.save(state, checkpoint_id=sys.argv[1], no_dist=True, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
