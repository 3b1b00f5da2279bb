"""The vocabulary of a save: its request, the prepared save, and its destination."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh

from jaxckpt._arguments.casts import Dtypes
from jaxckpt._arguments.specs import Specs
from jaxckpt._job.call import Call
from jaxckpt._model.records import StepRecord
from jaxckpt._model.tree import Container, Structure, Tree
from jaxckpt._options import Options
from jaxckpt._save.consistency import OwnFingerprint
from jaxckpt._save.describe import Draft, first_occurrences
from jaxckpt._save.reuse import Reuse, ReuseCache
from jaxckpt._save.running_saves import RunningSave, SaveInfo
from jaxckpt._save.staging import HeldObjects
from jaxckpt._save.write_plan import ArrayLeaf, SavePlan
from jaxckpt._store.store import Store
from jaxckpt.errors import InputError

if TYPE_CHECKING:
    from jaxckpt._save.shared_path import PublishResult
    from jaxckpt._save.write import OwnShare


@dataclass(frozen=True, slots=True)
class PlainTree:
    """A tree of plain jax.Arrays."""

    tree: Tree
    leaves: list[jax.Array]
    likeness: Any
    """Equal for trees that are stored in the same way, unless a custom node has changed in place."""

    @classmethod
    def of(cls, tree: Tree, subtrees: tuple[str, ...]) -> PlainTree | None:
        """The same tree; None if it has other leaves. Takes 2 ms for 2,000 leaves; describing them takes 11 ms."""
        try:
            leaves, treedef = jax.tree.flatten(tree)
        except (TypeError, ValueError, OverflowError, RecursionError, SystemError):
            return None  # reported with its path when the tree is described
        plain = type(leaves[0]) if leaves and isinstance(leaves[0], jax.Array) else None
        # The leaves of a tree of PRNG keys also have a single type.
        if plain is None or jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key) or issubclass(plain, Tracer):
            return None
        if any(type(leaf) is not plain or leaf.is_deleted() for leaf in leaves):
            return None
        forms = [(leaf.aval, leaf.sharding, leaf.committed) for leaf in leaves]
        return cls(tree, leaves, (treedef, forms, first_occurrences(leaves), subtrees))


class PlanCache:
    """The description and the plan of the last tree of plain arrays that a Checkpointer saved."""

    def __init__(self) -> None:
        self._entry: tuple[Any, Any, Draft, SavePlan] | None = None
        """Its likeness; its key paths, if a custom node may change them while the likeness stays equal; its draft
        without the values; and its plan."""

    def find(self, plain: PlainTree) -> tuple[Draft, SavePlan] | None:
        """The description and the plan of a tree that is like the last one."""
        if self._entry is None:
            return None
        likeness, paths, draft, plan = self._entry
        if not _is_equal(likeness, plain.likeness):
            return None
        if paths is not None and not _is_equal(paths, _key_paths(plain.tree)):
            return None
        values = {number: leaf for number, leaf in enumerate(plain.leaves) if number not in draft.ties}
        return replace(draft, values=values), plan

    def remember(self, plain: PlainTree, draft: Draft, plan: SavePlan) -> None:
        """Keep the description, without the values, and the plan of a tree."""
        if _has_str_keys(draft.structure):
            # A custom node may keep its keys in a list that changes in place, and would then still equal itself.
            paths = _key_paths(plain.tree) if _has_custom_nodes(draft.structure) else None
            self._entry = plain.likeness, paths, replace(draft, values={}), plan


def _is_equal(a: Any, b: Any) -> bool:
    try:
        return a == b
    except Exception:  # raised by static fields that cannot be compared, such as NumPy arrays
        return False


def _has_str_keys(structure: Structure) -> bool:
    """Whether all keys are str. Otherwise equal trees may have different paths, because 1, 1.0 and True are equal."""
    if not isinstance(structure, Container):
        return True
    return {*map(type, structure.keys or ())} <= {str} and all(map(_has_str_keys, structure.children))


def _has_custom_nodes(structure: Structure) -> bool:
    return isinstance(structure, Container) and (
        structure.type == "custom" or any(map(_has_custom_nodes, structure.children))
    )


def _key_paths(tree: Tree) -> Any:
    """JAX's path of each leaf. Takes 60 ms for 20,000 leaves; describing them takes 320 ms."""
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


# The request ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of a save."""

    destination: Destination
    options: Options
    tree: Tree = None
    mesh: Mesh | None = None
    specs: Specs = None
    dtype: Dtypes = None
    metadata: Any = None
    process_state: Mapping[str, Any] | None = None
    draft: Draft | None = None
    """A description that is saved instead of a tree."""

    step: StepRecord | None = None
    """The record of a Checkpointer. Its metrics are taken from process 0."""

    subtrees: tuple[str, ...] = ()
    """Paths of subtrees that are stored separately, so that they can be dropped later."""

    plan_cache: PlanCache | None = None
    """Cache of a Checkpointer for the description and the plan of the tree."""

    reuse_cache: ReuseCache | None = None
    """Cache for the published objects."""

    on_done: Callable[[SaveInfo], object] | None = None
    """Every process calls this when it knows that the checkpoint is published, before the save counts as done."""

    attempts: Callable[[Callable[..., SaveInfo], RunningSave], SaveInfo] | None = None
    """Does the work that it is given, a function of the running save, in the lane. It may repeat the work, with another
    call."""

    held: HeldObjects | None = None
    """Holds the data until the save has ended, so that `attempts` can repeat the work."""

    deadline: float | None = None
    """For the last step of a preempted job: the latest time, on the monotonic clock, until which the caller waits for
    memory for copies. After that, the save fails."""

    @property
    def step_number(self) -> int | None:
        """The step, if a Checkpointer saves it."""
        return None if self.step is None else self.step.number

    @property
    def is_last_step(self) -> bool:
        """Whether this is the last step of a preempted job."""
        return self.deadline is not None


def require_on_done(on_done: object) -> None:
    """Raise InputError unless a save can call this once it is done, or calls nothing."""
    if on_done is not None and not callable(on_done):
        raise InputError(f"on_done must be a function that takes a SaveInfo, found {on_done!r}")


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """A planned save: everything that is needed to run it, except the data."""

    request: SaveRequest
    call: Call
    draft: Draft
    plan: SavePlan
    reuse: Reuse
    """The objects that this process need not write again."""

    fingerprint: OwnFingerprint | None
    """What must be equal in every process. None in a job of one process."""

    state: bytes | None
    """The content of the file for this process's state."""

    @property
    def options(self) -> Options:
        return self.request.options

    @property
    def store(self) -> Store:
        return self.request.destination.store


class Destination(Protocol):
    """Where a save goes, and how it is carried out."""

    @property
    def store(self) -> Store:
        """The folder that this process writes to."""
        ...

    def check(self, request: SaveRequest) -> None:
        """Raise unless a save may begin. Process 0."""

    def plan(self, arrays: Iterable[ArrayLeaf], options: Options, process: int, processes: int) -> SavePlan: ...

    def save(self, share: OwnShare) -> PublishResult:
        """Claim the destination, write this process's share, and publish. Every process, in a lane."""
        ...
