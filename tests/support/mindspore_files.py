"""Writes MindSpore's files with Google's own protobuf, from its schemas checkpoint.proto and node_strategy.proto."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DATA = json.loads((Path(__file__).parents[1] / "data" / "mindspore_hybrid_parallel.json").read_text())
"""The numbers of the tutorial "Saving and Loading Models in Hybrid Parallel Mode"."""

# message: (field: (number, label, type)); a type with a capital is a message.
_SCHEMA = {
    "Checkpoint": {"value": (1, "repeated", "Value")},
    "Value": {
        "tag": (1, "required", "string"),
        "tensor": (2, "optional", "TensorProto"),
        "maptensor": (3, "optional", "MapTensorProto"),
    },
    "TensorProto": {
        "dims": (1, "repeated", "int64"),
        "tensor_type": (2, "required", "string"),
        "tensor_content": (3, "required", "bytes"),
    },
    "MapTensorProto": {"tensor": (1, "repeated", "TensorProto")},
    "Uint32s": {"dim": (1, "repeated", "uint32")},
    "Int32s": {"dim": (1, "repeated", "int32")},
    "Int64s": {"dim": (1, "repeated", "int64")},
    "ParallelStrategys": {"stage": (1, "required", "uint32"), "parallel_strategy": (2, "repeated", "Uint32s")},
    "ParallelStrategyItem": {
        "node_name": (1, "required", "string"),
        "parallel_strategys": (2, "required", "ParallelStrategys"),
    },
    "ParallelLayouts": {
        "dev_matrix": (1, "repeated", "Uint32s"),
        "tensor_map": (2, "repeated", "Int32s"),
        "param_split_shape": (3, "repeated", "Int64s"),
        "indices_offset": (4, "repeated", "Int64s"),
        "field": (5, "required", "int32"),
        "opt_weight_shard_step": (6, "required", "int32"),
        "opt_weight_shard_size": (7, "required", "int32"),
    },
    "ParallelLayoutItem": {
        "param_name": (1, "required", "string"),
        "parallel_layouts": (2, "required", "ParallelLayouts"),
    },
    "ParallelStrategyMap": {
        "current_stage": (1, "required", "uint32"),
        "parallel_strategy_item": (2, "repeated", "ParallelStrategyItem"),
        "parallel_layout_item": (3, "repeated", "ParallelLayoutItem"),
    },
}


@functools.cache
def _message(name: str) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="mindspore.proto", package="mindspore", syntax="proto2")
    for message, fields in _SCHEMA.items():
        described = file.message_type.add(name=message)
        for field, (number, label, kind) in fields.items():
            entry = described.field.add(name=field, number=number)
            entry.label = getattr(entry, f"LABEL_{label.upper()}")
            if kind[0].isupper():
                entry.type, entry.type_name = entry.TYPE_MESSAGE, f".mindspore.{kind}"
            else:
                entry.type = getattr(entry, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"mindspore.{name}"))


def _type(dtype: np.dtype[Any]) -> str:
    return {"bool": "Bool", "bfloat16": "BFloat16"}.get(dtype.name, dtype.name.title().replace("Uint", "UInt"))


def ckpt(tensors: Mapping[str, Any], *, slice_bytes: int = 512 << 20, crc: bool = False) -> bytes:
    """The output of save_checkpoint: one message per tensor, or several for a large one."""
    written = b""
    for name, value in tensors.items():
        array = np.asarray(value)
        kind, dims = ("str", [0]) if array.dtype.kind == "U" else (_type(array.dtype), array.shape)
        raw = array.tobytes()
        for start in range(0, max(1, len(raw)), slice_bytes):
            message = _message("Checkpoint")()
            entry = message.value.add(tag=name)
            entry.tensor.dims.extend(dims)
            entry.tensor.tensor_type, entry.tensor.tensor_content = kind, raw[start : start + slice_bytes]
            written += message.SerializeToString()
    return written + (b"crc_num" + zlib.crc32(written).to_bytes(10, "big") if crc else b"")


def layout(dev_matrix: Sequence[int], tensor_map: Sequence[int], **others: Any) -> dict[str, Any]:
    """A layout in the form of a JSON strategy file."""
    return {
        "dev_matrix": list(dev_matrix),
        "tensor_map": list(tensor_map),
        "field": 0,
        "opt_weight_shard_step": 0,
        "opt_weight_shard_size": 0,
        **others,
    }


def strategy_json(layouts: Mapping[str, Any], stage: int = 0) -> bytes:
    operators = {"MatMul-op1": {"stage": stage, "parallel_strategy": [[1, 1], [4, 1]]}}
    record = {"current_stage": stage, "parallel_strategy_item": operators, "parallel_layout_item": layouts}
    return json.dumps(record).encode()


def strategy_protobuf(layouts: Mapping[str, Any], stage: int = 0) -> bytes:
    message = _message("ParallelStrategyMap")(current_stage=stage)
    operator = message.parallel_strategy_item.add(node_name="MatMul-op1")
    operator.parallel_strategys.stage = stage
    operator.parallel_strategys.parallel_strategy.add(dim=[4, 1])
    for name, record in layouts.items():
        item = message.parallel_layout_item.add(param_name=name)
        for key, value in record.items():
            if key in ("field", "opt_weight_shard_step", "opt_weight_shard_size"):
                setattr(item.parallel_layouts, key, value)
            elif key != "tensor_shape":
                getattr(item.parallel_layouts, key).add(dim=value)
        for key in {"param_split_shape", "indices_offset"} - record.keys():
            getattr(item.parallel_layouts, key).add()
    return message.SerializeToString()


def map_parameter(name: str) -> bytes:
    message = _message("Checkpoint")()
    entry = message.value.add(tag=name)
    for _ in range(3):
        entry.maptensor.tensor.add(dims=[1], tensor_type="int32", tensor_content=bytes(4))
    return message.SerializeToString()


TUTORIAL = {name: layout([4], [0, -1], tensor_shape=[8, 8]) for name in ("weight", "moments.weight")}
"""The strategy of the tutorial: four devices, each with two rows of [8, 8]."""


def tutorial(folder: Path) -> dict[int, Path]:
    """The rank files of the tutorial, ./node{i}/net.ckpt, and its strategy in both forms."""
    (folder / "strategy.ckpt").write_bytes(strategy_protobuf(TUTORIAL))
    (folder / "strategy.json").write_bytes(strategy_json(TUTORIAL))
    files: dict[int, Path] = {}
    for rank, held in enumerate(DATA["ranks"]):
        files[rank] = folder / f"node{rank}" / "net.ckpt"
        files[rank].parent.mkdir()
        # Those of one element are printed as [0.01]: a tensor of one dimension.
        arrays = {name: np.array(value, np.float32) for name, value in held.items()}
        files[rank].write_bytes(ckpt({n: a.reshape(1) if a.size == 1 else a for n, a in arrays.items()}))
    return files
