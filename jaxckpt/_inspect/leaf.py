"""A leaf of an open checkpoint. Indexing it reads only the chunks that the index touches."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxckpt._inspect.drawing import clipped, definitions, layout_drawing, notebook
from jaxckpt._keywords import explain_names
from jaxckpt._model.grid import Box, Spec, show_axes
from jaxckpt._model.leaves import SavedLeaf
from jaxckpt._model.pieces import Array
from jaxckpt._options import Options
from jaxckpt._pipeline.units import show_bytes
from jaxckpt._restore.read_loop import StoredArray, host_value, read_box
from jaxckpt._sources.foreign import unreadable_reason
from jaxckpt._sources.source import Source
from jaxckpt.errors import show_path


@explain_names
class LazyLeaf:
    """A leaf of a checkpoint. Indexing it like a NumPy array reads only the chunks that the index touches."""

    __slots__ = ("_leaf", "_number", "_options", "_source")

    def __init__(self, source: Source, number: int, options: Options) -> None:
        self._source = source
        self._number = number
        self._options = options
        self._leaf = SavedLeaf(source.manifest, source.manifest.leaves[number])

    @property
    def path(self) -> str:
        """The path in the tree, for example "params/layers/3/kernel"."""
        return self._leaf.path

    @property
    def kind(self) -> str:
        """The saved kind: "jax", "numpy", "numpy_scalar", "key", "str", "bytes", "int", "float", "bool", "complex"."""
        return self._leaf.kind

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; () for a Python value. For a PRNG key, the shape of its raw data."""
        return self._leaf.stored_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype (from ml_dtypes for bfloat16, float8 and int4)."""
        return self._leaf.stored_dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def unreadable(self) -> str | None:
        """The reason why the leaf cannot be read although it is not damaged, such as an object of another program; None
        for other leaves."""
        return unreadable_reason(self._source, self._source.manifest.leaves[self._number])

    @property
    def nbytes(self) -> int:
        """Bytes of data; 0 for a value that is stored in the manifest."""
        return self._leaf.nbytes

    @property
    def spec(self) -> Any:
        """The jax.sharding.PartitionSpec at the time of the save; empty if there was none."""
        from jaxckpt._devices.shardings import partition_spec  # imports JAX

        return partition_spec(self._leaf.spec, self._leaf.reduced)

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axis sizes of the mesh at the time of the save; empty if there was none."""
        mesh = self._leaf.mesh
        return types.MappingProxyType(mesh.axes if mesh else {})

    @property
    def layout(self) -> str:
        """The saved mesh and spec, in words."""
        return self._leaf.layout

    @property
    def value(self) -> Array:
        """The whole leaf, without devices: a NumPy array. For some kinds a NumPy scalar or a Python value, which type
        checkers take for an array too."""
        if not self._leaf.is_array:
            return self._leaf.value
        return host_value(self[...], self.kind, self.path)

    def __getitem__(self, index: Any) -> Array:
        """NumPy indexing. The result is an array, or a NumPy scalar, which type checkers take for an array too.

        Integers, slices, Ellipsis and None read only the chunks that they touch. An index array reads the whole range
        from its smallest to its largest index; a boolean mask reads the full length of each dimension that it indexes.

        Raises:
            IndexError: The index does not fit the shape.
            DataError, StorageError: The chunks are damaged or cannot be read.
            NotACheckpointError: The checkpoint was deleted or replaced after it was opened.
        """
        if not self._leaf.is_array:
            return np.asarray(self._leaf.value)[index]
        box, rest = _enclosing_box(index, self.shape)
        return read_box(self._source, self._number, box, self._options)[rest]

    def slabs(self) -> Iterator[Array]:
        """The whole leaf in C order, as consecutive arrays that fit `options.host_bytes`."""
        if not self._leaf.is_array:
            return iter([np.asarray(self._leaf.value)])
        return StoredArray(self._source, self._number, self._options).slabs()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = np.asarray(self[...])
        return array if dtype is None else array.astype(dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d leaf")
        return self.shape[0]

    def __float__(self) -> float:
        return float(self._scalar_value("float"))

    def __int__(self) -> int:
        return int(self._scalar_value("int"))

    def _scalar_value(self, conversion: str) -> Any:
        """The value of a leaf that is one number. Raises TypeError for any other."""
        if self.shape or self.kind in ("str", "bytes"):
            raise TypeError(
                f"{conversion}() needs a leaf that is one number, but {show_path(self.path)} is {self._contents}"
            )
        return self.value

    @property
    def _contents(self) -> str:
        """Dtype and shape of an array, or the value, as text."""
        if reason := self.unreadable:
            return f"unreadable, because {reason}"
        return f"{self.dtype}{list(self.shape)}" if self._leaf.is_array else repr(self.value)

    def __repr__(self) -> str:
        return f"<leaf {self.path!r}: {self._contents}, {self.layout}>"

    def _repr_html_(self) -> str:
        """For notebooks: a description, and the boxes on the saved mesh."""
        contents = clipped(self._contents, 200)
        facts = {"leaf": self.path, "is": contents, "saved as": self.layout, "bytes": show_bytes(self.nbytes)}
        mesh, spec = self._leaf.mesh, self._leaf.spec
        drawn = [] if mesh is None else [layout_drawing(mesh, spec, len(self.shape), show_axes(mesh.axes))]
        return notebook(definitions(facts), *drawn)


def saved_spec(leaf: LazyLeaf) -> Spec:
    """The spec of a leaf at the time of the save, without JAX."""
    return leaf._leaf.spec  # pyright: ignore[reportPrivateUsage]


def _enclosing_box(index: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """The box that an index touches, and the index that remains to be applied to it. Raises IndexError."""
    entries = [_index_entry(entry) for entry in (index if isinstance(index, tuple) else (index,))]
    used = sum(map(_dims, entries))
    if sum(entry is Ellipsis for entry in entries) > 1:
        raise IndexError("an index can have only one Ellipsis ('...')")
    if used > len(shape):
        raise IndexError(f"too many indices: {used} for an array of shape {shape}")
    box: list[tuple[int, int]] = []
    rest: list[Any] = []
    for entry in entries:
        if entry is Ellipsis:
            box.extend((0, length) for length in shape[len(box) : len(box) + len(shape) - used])
            rest.append(Ellipsis)  # even for zero dimensions, because it separates index arrays on its two sides
        elif entry is None:
            rest.append(None)
        elif isinstance(entry, np.ndarray) and entry.dtype == bool:  # a mask consumes as many dimensions as it has
            for _ in range(entry.ndim):
                box.append((0, shape[len(box)]))
            rest.append(entry)
        else:
            bounds, remaining = _enclosing_range(entry, shape[len(box)])
            box.append(bounds)
            rest.append(remaining)
    box.extend((0, length) for length in shape[len(box) :])
    return tuple(box), tuple(rest)


def _index_entry(entry: Any) -> Any:
    """One entry of an index as None, Ellipsis, a slice, an int, or an array of ints or bools. Raises IndexError."""
    if entry is None or entry is Ellipsis or isinstance(entry, slice):
        return entry
    array = np.asarray(entry)
    if array.size == 0 and not hasattr(entry, "dtype"):
        array = array.astype(np.intp)
    if array.dtype.kind not in "iub":
        raise IndexError(f"only integers, slices, Ellipsis, None and integer or boolean arrays index, found {entry!r}")
    return int(array) if array.ndim == 0 and array.dtype != bool and not isinstance(entry, np.ndarray) else array


def _dims(entry: Any) -> int:
    if entry is None or entry is Ellipsis:
        return 0
    return entry.ndim if isinstance(entry, np.ndarray) and entry.dtype == bool else 1


def _enclosing_range(entry: Any, length: int) -> tuple[tuple[int, int], Any]:
    """The range (start, stop) that an index of one dimension touches, and the index within that range."""
    if isinstance(entry, slice):
        numbers = range(*entry.indices(length))
        if not numbers:
            return (0, 0), slice(0, 0)
        low, high = min(numbers[0], numbers[-1]), max(numbers[0], numbers[-1])
        return (low, high + 1), slice(None, None, numbers.step)
    array = np.asarray(entry).astype(np.intp)
    if array.size and (array.min() < -length or array.max() >= length):
        raise IndexError(f"index {entry} is out of bounds for a dimension of length {length}")
    numbers = np.where(array < 0, array + length, array)
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, -1)
    return (low, high + 1), int(numbers - low) if isinstance(entry, int) else numbers - low
