"""A format of another package: a folder with index.json, and one file per array.

index.json: {"format": "rawdir", "arrays": {"params/w": {"dtype": "float32", "shape": [4, 3], "file": "0.bin"}}}
"""

import json
import math
import os

import numpy as np

import jaxckpt
from jaxckpt.formats import ArrayData, ForeignArray, Format, compose, opened


class RawData(ArrayData):
    """An array in a file: little-endian, in C order."""

    def __init__(self, path, dtype, shape):
        self.path, self.dtype, self.shape = path, np.dtype(dtype), shape

    def read(self, box, target):
        """Read a box row by row. `target` has its shape."""
        if not target.size:
            return
        with opened(self.path) as file:
            for index in np.ndindex(target.shape[:-1]):
                row = [start + at for (start, _), at in zip(box, index, strict=False)]
                start, stop = box[-1] if box else (0, 1)
                first = np.ravel_multi_index((*row, start), self.shape) if box else 0
                data = file.read((stop - start) * self.dtype.itemsize, first * self.dtype.itemsize)
                if len(data) < (stop - start) * self.dtype.itemsize:
                    raise jaxckpt.errors.DataError(f"{self.path} was truncated")
                target[index if target.ndim else ...] = np.frombuffer(data, self.dtype).reshape(target.shape[-1:])


def read_index(path):
    with opened(f"{path}/index.json") as file:
        return json.loads(file.read(1 << 20, 0))


def recognizes(path, names):
    return "index.json" in names and read_index(path).get("format") == "rawdir"


def open_rawdir(path):
    tree = {}
    for name, entry in read_index(path)["arrays"].items():
        *above, last = name.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        shape, where = tuple(entry["shape"]), f"{path}/{os.path.basename(entry['file'])}"
        with opened(where) as file:
            if not file.has_size(math.prod(shape) * np.dtype(entry["dtype"]).itemsize):
                raise jaxckpt.errors.DataError(f"{where} has another size than {name!r}")
        node[last] = ForeignArray(entry["dtype"], shape, RawData(where, entry["dtype"], shape))
    return compose(path, tree, "rawdir")


FORMAT = Format("rawdir", recognizes, open_rawdir, owned_names=lambda path, names: names)
