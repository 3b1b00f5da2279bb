"""Checkpoints in ColossalAI's formats, by torch.save and safetensors. ColossalAI needs GPUs and is not installed.

This code does what these functions of hpcaitech/ColossalAI do, for each rank in turn:

    colossalai/checkpoint_io/distributed_checkpoint_io.py: DistributedCheckpointIO.create_model_metadata, save_metadata,
        model_state_dict, save_unsharded_model, save_sharded_model
    colossalai/checkpoint_io/utils.py: StateDictSharder, save_state_dict_shards, get_shard_filename, save_param_groups
    colossalai/checkpoint_io/general_checkpoint_io.py: GeneralCheckpointIO.save_sharded_model, save_sharded_optimizer
    colossalai/utils/safetensors.py: _object_to_tensor, _flatten_optim_state_dict, prepare

    python colossalai_writer.py FOLDER
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

TP, PP = 2, 2


def bits(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return torch.from_numpy(raw).view(dtype).squeeze(-1)


PARAMETERS = {  # of each pipeline stage: the whole shape, and the dimension that tensor parallelism splits
    0: {
        "embed.weight": (bits(0, 14, 8, dtype=torch.bfloat16), 0),
        "layers.0.up.weight": (bits(1, 16, 8, dtype=torch.bfloat16), 0),
        "layers.0.up.bias": (bits(2, 16, dtype=torch.bfloat16), 0),
        "layers.0.down.weight": (bits(3, 8, 16, dtype=torch.bfloat16), 1),
        "layers.0.norm.weight": (bits(4, 8), None),
    },
    1: {
        "layers.1.up.weight": (bits(5, 16, 8, dtype=torch.bfloat16), 0),
        "layers.1.norm.weight": (bits(6, 8), None),
        "head.weight": (bits(7, 14, 8), 0),
    },
}
BUFFERS = {0: {"layers.0.rotary": bits(8, 4)}, 1: {}}
WHOLE = {name: whole for stage in PARAMETERS.values() for name, (whole, _) in stage.items()}


def local(whole: torch.Tensor, dim: int | None, rank: int) -> torch.Tensor:
    """One rank's shard. 14 rows are padded to 16 (padded_tensor), like a vocabulary, so that each rank has 8."""
    if dim is None:
        return whole
    sides = list(whole.shape)
    sides[dim] = -(-sides[dim] // (4 * TP)) * 4 * TP
    padded = torch.zeros(sides, dtype=whole.dtype)
    padded[tuple(slice(side) for side in whole.shape)] = whole
    return padded.chunk(TP, dim)[rank].contiguous()


def create_model_metadata(stage: int, rank: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, (whole, dim) in PARAMETERS[stage].items():
        param = local(whole, dim, rank)
        offsets, lengths = torch.zeros(len(whole.shape), dtype=torch.int), list(param.shape)
        if dim is not None:
            partition_size = param.shape[dim]
            offsets[dim] = partition_size * rank
            if rank == TP - 1:
                lengths[dim] = whole.shape[dim] - partition_size * (TP - 1)
        found[name] = {"offsets": offsets, "lengths": lengths, "global_shape": list(whole.shape)}
    return found


def save_metadata(metadata: dict[str, dict[str, Any]], path: Path, rank: int, file: str | None = None) -> None:
    dicts: dict[str, Any] = {"checkpoint_version": "1.0", "total_size": None, "metadata": {}}
    for name, data in metadata.items():
        dicts["metadata"][name] = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in data.items()}
        if file is not None:
            dicts["metadata"][name]["file"] = file
        dicts["metadata"][name]["rank"] = rank
    path.write_text(json.dumps(dicts, indent=4))


def save_state_dict(state: dict[str, Any], path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(state, path, metadata={"format": "pt"})
    else:
        torch.save(state, path)


def shards(state: dict[Any, Any], per_shard: int) -> list[dict[Any, Any]]:
    """Like StateDictSharder, but limits the number of entries instead of their size."""
    items = list(state.items())
    return [dict(items[first : first + per_shard]) for first in range(0, len(items), per_shard)]


def save_state_dict_shards(state: dict[Any, Any], folder: Path, base: str, per_shard: int = 2) -> dict[str, str]:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards(state, per_shard)):
        name = base.replace(".bin", f"-{number + 1:05d}.bin").replace(".safetensors", f"-{number + 1:05d}.safetensors")
        save_state_dict(shard, folder / name)
        weight_map |= dict.fromkeys(map(str, shard), name)
    return weight_map


def save_unsharded_model(folder: Path, suffix: str) -> None:
    """One file per rank."""
    folder.mkdir()
    for stage in range(PP):
        for rank in range(TP):
            state = {name: local(*found, rank) for name, found in PARAMETERS[stage].items()} | BUFFERS[stage]
            number = TP * stage + rank
            file = f"pytorch_model-dist-{number:05d}{suffix}"
            meta = folder / f"pytorch_model-meta-dist-{number:05d}.json"
            save_metadata(create_model_metadata(stage, rank), meta, number, file)
            save_state_dict(state, folder / file)


def save_sharded_model(folder: Path, weights_name: str) -> None:
    """Several files per rank."""
    folder.mkdir()
    for stage in range(PP):
        for rank in range(TP):
            state = {name: local(*found, rank) for name, found in PARAMETERS[stage].items()} | BUFFERS[stage]
            number = TP * stage + rank
            base = weights_name.replace(".bin", f"-dist-{number:05d}-shard.bin")
            base = base.replace(".safetensors", f"-dist-{number:05d}-shard.safetensors")
            weight_map = save_state_dict_shards(state, folder, base)
            metadata = create_model_metadata(stage, rank)
            for name in metadata:
                metadata[name]["file"] = weight_map[name]
            save_metadata(metadata, folder / f"pytorch_model-meta-dist-{number:05d}.index.json", number)


def save_gathered_model(folder: Path) -> None:
    """Like GeneralCheckpointIO: whole tensors in several files."""
    folder.mkdir()
    weight_map = save_state_dict_shards(WHOLE, folder, "pytorch_model.bin", 3)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=4))


STATES = {
    number: {"step": torch.tensor(3.0), "exp_avg": bits(20 + number, 4, 4), "exp_avg_sq": bits(30 + number, 4, 4)}
    for number in range(3)
}
GROUPS = [{"lr": 0.01, "betas": (0.9, 0.999), "amsgrad": False, "params": [0, 1, 2]}]


def save_sharded_optimizer(folder: Path) -> None:
    folder.mkdir()
    weight_map = save_state_dict_shards(STATES, folder, "pytorch_optim.bin")
    torch.save(GROUPS, folder / "pytorch_optim_group.bin")
    index = {"metadata": {"param_groups": "pytorch_optim_group.bin", "total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_optim.bin.index.json").write_text(json.dumps(index, indent=4))


def object_to_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def save_optimizer_in_background(folder: Path) -> None:
    """Like use_async=True: safetensors files, and a pickle for everything that is not a tensor."""
    folder.mkdir()
    states = {number: {**state, "step": 3, "extra": {"a": [1, 2]}} for number, state in STATES.items()}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards(states, 2)):
        name, flat, plain = f"pytorch_optim-{number + 1:05d}.safetensors", {}, []
        for parameter, state in shard.items():
            for key, value in state.items():
                nested = f"state-{parameter}-{key}"
                if not isinstance(value, torch.Tensor):
                    plain.append(nested)
                    value = object_to_tensor(value)
                flat[nested] = value
        save_file(flat, folder / name, metadata={"format": "pt", "non_tensor_keys": json.dumps(plain)})
        weight_map |= dict.fromkeys(map(str, shard), name)
    torch.save(GROUPS, folder / "pytorch_optim_group.bin")
    index = {"metadata": {"param_groups": "pytorch_optim_group.bin", "total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_optim.safetensors.index.json").write_text(json.dumps(index, indent=4))


def main(folder: Path) -> None:
    save_unsharded_model(folder / "file of each rank, bin", ".bin")
    save_unsharded_model(folder / "file of each rank, safetensors", ".safetensors")
    save_sharded_model(folder / "files of each rank, bin", "pytorch_model.bin")
    save_sharded_model(folder / "files of each rank, safetensors", "model.safetensors")
    save_gathered_model(folder / "whole")
    save_sharded_optimizer(folder / "optimizer")
    save_optimizer_in_background(folder / "optimizer in background")
    tensors = WHOLE | BUFFERS[0] | {f"{n}/{k}": t for n, state in STATES.items() for k, t in state.items()}
    for name, tensor in tensors.items():
        path = folder / "expected" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
