"""Copies a DCP checkpoint, with each .metadata damaged in one way. Arguments: the checkpoint, the folder."""

from __future__ import annotations

import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

source, target = map(Path, sys.argv[1:])
NAME = "model.0.weight"


def damaged(name):
    def write(change):
        folder = target / name
        shutil.copytree(source, folder)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata, metadata.state_dict_metadata[NAME], metadata.storage_data)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return write


def place(storage, **changes):
    for index, info in storage.items():
        if index.fqn == NAME:
            storage[index] = replace(info, **changes)


@damaged("hole")
def _(metadata, item, storage):
    del item.chunks[-1]


@damaged("overlap")
def _(metadata, item, storage):
    item.chunks[0].sizes = torch.Size([13, 12])


@damaged("beyond")
def _(metadata, item, storage):
    item.size = torch.Size([20, 12])


@damaged("huge")
def _(metadata, item, storage):
    item.size = torch.Size([1 << 40, 12])
    item.chunks[:] = [replace(item.chunks[0], sizes=item.size)]


@damaged("another dtype")
def _(metadata, item, storage):
    item.properties.dtype = torch.int32


@damaged("another shape")
def _(metadata, item, storage):
    item.size = torch.Size([24, 6])
    for chunk in item.chunks:
        chunk.sizes = torch.Size([12, 6])


@damaged("nowhere")
def _(metadata, item, storage):
    for index in [index for index in storage if index.fqn == NAME]:
        del storage[index]


@damaged("upwards")
def _(metadata, item, storage):
    place(storage, relative_path="../hole/__0_0.distcp")


@damaged("absolute")
def _(metadata, item, storage):
    place(storage, relative_path="/etc/passwd")


@damaged("long")
def _(metadata, item, storage):
    place(storage, length=1 << 40)


@damaged("encoded")
def _(metadata, item, storage):
    place(storage, transform_descriptors=["zstd"])


@damaged("elsewhere")
def _(metadata, item, storage):
    place(storage, offset=100)


@damaged("list")
def _(metadata, item, storage):
    metadata.planner_data[NAME] = ("optimizer", "param_groups", 1 << 30)


@damaged("negative")
def _(metadata, item, storage):
    place(storage, offset=-5)


@damaged("path")
def _(metadata, item, storage):
    metadata.planner_data[NAME] = ("step", "below")


@damaged("same path")
def _(metadata, item, storage):
    metadata.planner_data[NAME] = metadata.planner_data["step"]


class Runs:
    def __reduce__(self):
        return __import__("os").system, (f"touch {target / 'run'}",)


@damaged("hostile")
def _(metadata, item, storage):
    metadata.storage_meta = Runs()


@damaged("hostile place")
def _(metadata, item, storage):
    place(storage, relative_path=Runs())


state = {"w": torch.ones(2, 3), "step": 3}
writer = FileSystemWriter(target / "as safetensors", serialization_format=SerializationFormat.SAFETENSORS)
dcp.save(state, storage_writer=writer, no_dist=True)
try:
    dcp.load(state, checkpoint_id=target / "as safetensors", no_dist=True)
except dcp.CheckpointException:
    print("torch cannot load it")
