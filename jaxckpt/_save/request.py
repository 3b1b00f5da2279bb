"""The vocabulary of a save: its request, the prepared save, and its destination."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax.sharding import Mesh

from jaxckpt._arguments.casts import Dtypes
from jaxckpt._arguments.specs import Specs
from jaxckpt._job.call import Call
from jaxckpt._job.collectives import CollectiveCalls
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._model.file_names import data_folder
from jaxckpt._model.records import StepRecord
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options
from jaxckpt._save.compose_manifest import PublishResult, Share
from jaxckpt._save.consistency import OwnFingerprint
from jaxckpt._save.describe import Draft
from jaxckpt._save.plan_cache import PlanCache
from jaxckpt._save.reuse import Reuse, ReuseCache
from jaxckpt._save.save_info import SaveInfo
from jaxckpt._save.staging import StagedObject
from jaxckpt._save.write_plan import ArrayLeaf, SavePlan
from jaxckpt._store.store import Store
from jaxckpt._store.transaction import Transaction


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
    def destination(self) -> Destination:
        return self.request.destination

    @property
    def options(self) -> Options:
        return self.request.options

    @property
    def store(self) -> Store:
        return self.request.destination.store


@dataclass(frozen=True, slots=True)
class Begun:
    """What all processes know when the path has been claimed."""

    save_id: str
    terms: str
    """What the destination has decided in process 0."""

    @property
    def data(self) -> str:
        """Name of the data folder."""
        return data_folder(self.save_id)


class Destination(Protocol):
    """Where a save goes. `save` calls these methods in this order, in every process unless stated otherwise."""

    @property
    def store(self) -> Store:
        """The folder that this process writes to."""
        ...

    def check(self, request: SaveRequest) -> None:
        """Raise unless a save may begin. Process 0, in the caller's thread."""

    def plan(self, arrays: Iterable[ArrayLeaf], options: Options, process: int, processes: int) -> SavePlan: ...

    def offer(self, save: PreparedSave) -> list[int]:
        """What process 0 needs to know from this process before it begins the save."""
        ...

    def begin(self, save: PreparedSave, save_id: str, offers: Sequence[list[int]]) -> tuple[str, Transaction | None]:
        """Decide the terms of the save, and begin the transaction of process 0, if only that process has one. Process
        0, after all are prepared."""
        ...

    def join(self, save: PreparedSave, begun: Begun) -> Transaction | None:
        """Begin the transaction of this process, if each process has one. Otherwise check that this process sees what
        process 0 has begun."""
        ...

    def exchange(self, save: PreparedSave, begun: Begun) -> CollectiveCalls[Any, Any]:
        """The exchanges between the processes while they stage their data. In a lane."""
        ...

    def staged(
        self,
        save: PreparedSave,
        begun: Begun | None,
        own: Generator[StagedObject],
        calls: CollectiveCalls[Any, Any] | None,
    ) -> Generator[StagedObject]:
        """The objects that this process writes, given those that it stages itself. `begun` and `calls` are None unless
        the plan is collective. In a lane."""
        ...

    def publish(
        self, rendezvous: Rendezvous, save: PreparedSave, begun: Begun, transaction: Transaction | None, share: Share
    ) -> PublishResult:
        """Publish the manifest after all have written their share."""
        ...

    def finish(self, save: PreparedSave, begun: Begun, published: PublishResult) -> None:
        """Do what follows from the publication, before the save counts as done."""
