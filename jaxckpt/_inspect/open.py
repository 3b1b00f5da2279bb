"""Opens a checkpoint for inspection: its tree, its metadata, its leaves, and plans of restores."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from jaxckpt._inspect.drawing import byte_bars, clipped, definitions, layout_drawing, notebook
from jaxckpt._keywords import explain_keywords, explain_names
from jaxckpt._model.grid import Box, Spec, show_axes
from jaxckpt._model.paths import closest_hint
from jaxckpt._model.pieces import Array
from jaxckpt._model.records import Manifest, SavedLeaf
from jaxckpt._model.select import Select
from jaxckpt._model.tree import Tree, unflatten
from jaxckpt._options import Options, options_or_default, require_whole_number
from jaxckpt._pipeline.progress import show_bytes
from jaxckpt._restore.read_loop import StoredArray, host_value, read_box
from jaxckpt._rules.rename import Renaming, renamed_source
from jaxckpt._rules.rule_set import view_through
from jaxckpt._run_folder.leases import TERM_SECONDS, hold
from jaxckpt._sources.foreign import unreadable_reason
from jaxckpt._sources.open_source import Location, source_at, step_of
from jaxckpt._sources.source import NativeCheckpoint, Source
from jaxckpt._store.load_manifest import load_states
from jaxckpt.errors import NotACheckpointError, show_count, show_path

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from jaxckpt._arguments.casts import Dtypes
    from jaxckpt._arguments.specs import Specs
    from jaxckpt._inspect.restore_plan import RestorePlan
    from jaxckpt._restore.differences import Strict
    from jaxckpt._restore.restore import DescribedTree, RestoreArguments, T


# Leaves ---------------------------------------------------------------------------------------------------


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


# Checkpoints ----------------------------------------------------------------------------------------------


@explain_keywords
def open(
    path: Location,
    *,
    rename: Renaming | None = None,
    manifest_sha256: str | None = None,
    options: Options | None = None,
) -> Checkpoint:
    """Open a checkpoint to inspect it. Only its manifest is read.

    Any single process may call this; no JAX backend is started.

    Args:
        path: A path or URL that `save` wrote, or another checkpoint that `restore` accepts.
        rename: As for `restore`: the checkpoint is shown with these names, or through these rules.
        manifest_sha256: As for `restore`.
        options: See `Options`.

    Returns:
        A `Checkpoint`: a mapping from leaf paths to leaves, which are read when they are indexed.

    Raises:
        NotACheckpointError: `path` has no manifest.
        ManifestError: The manifest is damaged or has a newer format.
        DataError: A checkpoint of another library is damaged.
        StorageError: The manifest cannot be read.
        TreeError: A path of `rename` matches nothing.
        MismatchError: The `Rules` in `rename` do not fit the checkpoint.
        InputError: Another argument is invalid.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/open", {"w": np.arange(100)}, overwrite=True)
        >>> jaxckpt.open("/tmp/jaxckpt-doc/open")["w"][8:12]
        array([ 8,  9, 10, 11])
    """
    options = options_or_default(options)
    source = source_at(path, options, manifest_sha256)
    if isinstance(source, NativeCheckpoint):
        source = replace(source, keeps_readers=True)
    return Checkpoint(renamed_source(source, rename), options)


@explain_names
class Checkpoint(Mapping[str, LazyLeaf]):
    """An open checkpoint: a mapping from leaf paths to lazy leaves. It is equal only to itself."""

    def __init__(self, source: Source, options: Options) -> None:
        self._source = source
        self._manifest: Manifest = source.manifest
        self._options = options
        self._numbers = source.manifest.numbers

    @property
    def path(self) -> str:
        """The path or URL of the checkpoint."""
        return self._source.url

    @property
    def format(self) -> str:
        """ "jaxckpt", or the name of the other format."""
        return self._manifest.format

    @property
    def save_id(self) -> str:
        """Unique id of the save. Empty for other formats, as are the date and the libraries."""
        return self._manifest.save_id

    @property
    def created(self) -> str:
        """When the checkpoint was saved: UTC, ISO 8601."""
        return self._manifest.created

    @property
    def metadata(self) -> Any:
        """The JSON value given to `save`."""
        return self._manifest.metadata

    @property
    def step(self) -> int | None:
        """The training step, if a Checkpointer saved it, otherwise None."""
        return None if self._manifest.step is None else self._manifest.step.number

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """The metrics given to `Checkpointer.save`; None for NaN. `Run.metrics` has added ones too."""
        return types.MappingProxyType({} if self._manifest.step is None else self._manifest.step.metrics)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Subtrees that a Checkpointer's `keep_last_of=` has deleted since the save."""
        return () if self._manifest.step is None else tuple(self._manifest.step.dropped)

    @property
    def process_states(self) -> list[dict[str, Any]]:
        """The `process_state` that each process gave to `save`, in order of the processes; empty if there was none.

        Read and checked on each access. Raises DataError.
        """
        if not isinstance(self._source, NativeCheckpoint):
            return []
        return load_states(self._source.store, self._manifest)

    @property
    def libraries(self) -> Mapping[str, str]:
        """Version of each library that saved the checkpoint, by name."""
        return types.MappingProxyType(self._manifest.libraries)

    @property
    def processes(self) -> list[tuple[str, int]]:
        """For each process that saved the checkpoint: the name of its host, and the bytes of array data that it wrote.
        Empty for other formats."""
        return list(self._manifest.processes)

    @property
    def phase_seconds(self) -> Mapping[str, list[float]]:
        """For each phase of the save, the seconds of each process; see `SaveInfo.phase_seconds`."""
        return types.MappingProxyType(self._manifest.phase_seconds)

    @property
    def nbytes(self) -> int:
        """Bytes of array data, uncompressed. Replicas are counted once."""
        return sum(math.prod(stack.array_shape) * stack.itemsize for stack in self._manifest.decoded_stacks)

    @property
    def leaves(self) -> dict[str, LazyLeaf]:
        """All leaves by path, in the order of the tree."""
        return {path: self._leaf(number) for path, number in self._numbers.items()}

    @contextlib.contextmanager
    def hold(self, *, term_seconds: float = TERM_SECONDS) -> Generator[Checkpoint]:
        """Protect this step of a run from deletion while a `with` block reads it. Nothing is copied.

        A thread writes and renews a lease, a small file in `_run` of the run's directory. The `keep_` rules of a
        `Checkpointer` do not delete the step until the block ends or, if this process dies, until the lease expires.
        `Checkpointer.delete`, and a save that replaces the step, ignore leases.

        Args:
            term_seconds: How long a lease outlives its holder; 60 by default. The lease is renewed every eighth of the
                term, and counts as expired after half of the term without renewal. A process that is suspended for
                longer loses the lease.

        Returns:
            A context manager whose value is this checkpoint.

        Raises:
            InputError: The checkpoint is not a step in a run's directory; rules delete only those.
            NotACheckpointError: The step was deleted or replaced since it was opened.
            StorageError: The lease cannot be written, for example without write permission in the run's directory.

        Examples:
            >>> import jaxckpt
            >>> with jaxckpt.Checkpointer("/tmp/jaxckpt-doc/held", keep_last=1) as run:
            ...     saved = run.save(10, {"w": 1}, overwrite=True)
            >>> with jaxckpt.open("/tmp/jaxckpt-doc/held").hold() as checkpoint:
            ...     checkpoint["w"].value
            1
        """
        source, run, step = step_of(self._source, "a Checkpointer deletes only those")
        with hold(run, step, term_seconds):
            change = source.change_since_open()
            if change is not None:
                raise NotACheckpointError(f"{change} since it was opened: open it again")
            yield self

    def tree(self) -> Tree:
        """The saved tree with lazy leaves."""
        return unflatten(self._manifest.tree, [self._leaf(number) for number in range(len(self._manifest.leaves))])

    def __getitem__(self, path: str) -> LazyLeaf:
        if path not in self._numbers:
            below = [leaf for leaf in self._numbers if leaf.startswith(f"{path}/")]
            hint = f"; leaves below it: {', '.join(below[:3])}" if below else closest_hint(str(path), self._numbers)
            raise KeyError(f"no leaf {show_path(path)} in {self.path}{hint}")
        return self._leaf(self._numbers[path])

    def __contains__(self, path: object) -> bool:
        return path in self._numbers

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def get(self, path: str, default: Any = None, /) -> Any:
        """The leaf at a path, or `default` if there is none."""
        number = self._numbers.get(path)
        return default if number is None else self._leaf(number)

    def _ipython_key_completions_(self) -> list[str]:
        """For notebooks: the completions after `checkpoint["`."""
        return list(self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        made = f"saved {self.created}" if self.created else self.format
        return f"<Checkpoint {self.path!r}: {show_count(len(self), 'leaf')}, {show_bytes(self.nbytes)}, {made}>"

    def _repr_html_(self) -> str:
        """For notebooks: a description, and the bytes of each subtree."""
        facts = {"checkpoint": self.path, "format": self.format, "leaves": f"{len(self):,}"}
        facts |= {"bytes": show_bytes(self.nbytes)} | ({"saved": self.created} if self.created else {})
        sizes = {leaf.path: self._manifest.leaf_bytes(leaf) for leaf in self._manifest.leaves}
        return notebook(definitions(facts), byte_bars(sizes))

    def _leaf(self, number: int) -> LazyLeaf:
        return LazyLeaf(self._source, number, self._options)

    @overload
    def restore(
        self, target: DescribedTree = None, *, options: Options | None = None, **arguments: Unpack[RestoreArguments]
    ) -> Tree: ...
    @overload
    def restore(self, target: T, *, options: Options | None = None, **arguments: Unpack[RestoreArguments]) -> T: ...
    def restore(
        self,
        target: Tree = None,
        *,
        mesh: Mesh | None = None,
        specs: Specs = None,
        select: Select | None = None,
        rename: Renaming | None = None,
        strict: Strict = True,
        dtype: Dtypes = None,
        tied: bool = False,
        options: Options | None = None,
    ) -> Tree:
        """Restore this checkpoint. In a job of several processes, every process opens it and calls this.

        The arguments and the errors are those of `jaxckpt.restore`. If the checkpoint was opened with `rename`, all
        paths are those that it shows.
        """
        from jaxckpt._restore.match import RestoreRequest
        from jaxckpt._restore.restore import run_restore

        request = RestoreRequest(target, mesh, specs, select, rename, strict, dtype=dtype, tied=tied)
        return run_restore(self.path, request, self._options if options is None else options, source=self._source)

    def plan(
        self,
        target: Tree = None,
        *,
        mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
        specs: Specs = None,
        select: Select | None = None,
        rename: Renaming | None = None,
        strict: Strict = True,
        dtype: Dtypes = None,
        tied: bool = False,
        devices_per_process: int = 8,
        options: Options | None = None,
    ) -> RestorePlan:
        """Plan a restore without reading any data: what each process would read with these arguments.

        Args:
            target: As for `restore`.
            mesh: As for `restore`, or a mesh that this machine does not have: a jax.sharding.AbstractMesh, or axis
                sizes such as {"data": 64, "model": 8}.
            specs: As for `restore`.
            select: As for `restore`.
            rename: As for `restore`.
            strict: As for `restore`.
            dtype: As for `restore`.
            tied: As for `restore`; it does not change what is read.
            devices_per_process: For a mesh that this machine does not have: the number of devices per process, in
                row-major order.
            options: See `Options`.

        Returns:
            A `RestorePlan`; print it to see a table. Its `value_dependent` lists leaves whose cast depends on their
            values: `restore` raises MismatchError if the cast would change one.

        Raises:
            MismatchError, TreeError, SpecError, LayoutError, InputError: As `restore` would.
        """
        from jax.sharding import Mesh

        from jaxckpt._inspect.restore_plan import plan_restore
        from jaxckpt._restore.match import RestoreRequest, require_request
        from jaxckpt._restore.resolve import resolve

        devices_per_process = require_whole_number(
            devices_per_process, "devices_per_process", minimum=1, maximum=1 << 31
        )
        options = self._options if options is None else options_or_default(options)
        planned = None if isinstance(mesh, Mesh) else devices_per_process
        request = RestoreRequest(target, mesh, specs, select, rename, strict, planned, dtype=dtype, tied=tied)
        require_request(request)
        source = self._source if request.rules is None else view_through(request.rules, self._source)
        return plan_restore(source, resolve(source.manifest, request, options), options)
