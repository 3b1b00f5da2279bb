"""The destination of a save: where its objects go, and who publishes the manifest there."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from jaxckpt._job.collectives import CollectiveCalls
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._model.file_names import data_folder
from jaxckpt._options import Options
from jaxckpt._save.staging import StagedObject
from jaxckpt._save.write_plan import ArrayLeaf, SavePlan
from jaxckpt._store.store import Store
from jaxckpt._store.transaction import Transaction

if TYPE_CHECKING:
    from jaxckpt._save.compose_manifest import PublishResult, Share
    from jaxckpt._save.prepare import PreparedSave, SaveRequest


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
        """The exchanges between the processes while they stage their data. In the caller's thread."""
        ...

    def staged(
        self,
        save: PreparedSave,
        begun: Begun | None,
        own: Generator[StagedObject],
        calls: CollectiveCalls[Any, Any] | None,
    ) -> Generator[StagedObject]:
        """The objects that this process writes, given those that it stages itself. `begun` and `calls` are None unless
        the plan is collective. In the caller's thread."""
        ...

    def publish(
        self, rendezvous: Rendezvous, save: PreparedSave, begun: Begun, transaction: Transaction | None, share: Share
    ) -> PublishResult:
        """Publish the manifest after all have written their share."""
        ...

    def finish(self, save: PreparedSave, begun: Begun, published: PublishResult) -> None:
        """Do what follows from the publication, before the save counts as done."""
