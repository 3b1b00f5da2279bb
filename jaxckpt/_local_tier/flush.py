"""Flushing: copies the files of a local step to the storage, at a bounded rate and without the devices.

local save published ─▶ claim the path ─▶ each process copies the files that it owns ─▶ all meet ─▶ process 0 publishes

The manifest of the local step itself is published, so both are the same checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxckpt._job.call import Call
from jaxckpt._model import zarr
from jaxckpt._model.manifest import state_file_name
from jaxckpt._model.object_index import problem_of
from jaxckpt._model.records import Manifest
from jaxckpt._options import Options
from jaxckpt._pipeline.control import RateLimiter
from jaxckpt._pipeline.lanes import finish_first, release_caller
from jaxckpt._pipeline.progress import Report, display_progress
from jaxckpt._save.running_saves import RunningSave, SaveInfo
from jaxckpt._save.save import carry_out
from jaxckpt._save.shared_path import SharedPath, require_shared
from jaxckpt._save.write_plan import Object
from jaxckpt._store.folder import Folder
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store import Store
from jaxckpt._store.transaction import Transaction
from jaxckpt.errors import DataError


@dataclass(slots=True)
class Flush:
    """A local step that is being copied to the storage."""

    step: int
    source: Folder
    """This process's share of the step."""

    destination: SharedPath
    call: Call
    options: Options
    bytes_per_second: float | None
    """Largest rate in bytes per second."""

    on_done: Callable[[SaveInfo], object] | None
    save_id: str = ""
    owned: Sequence[Object] = ()
    """The objects that this process owns. These and the save id are known when the local save is published."""

    attempts: Callable[[Callable[..., SaveInfo], RunningSave], SaveInfo] | None = None
    """As in a `SaveRequest`."""

    running: RunningSave | None = None
    is_warned: bool = False
    """Whether skipped local steps have been logged."""

    def begin(self, local: RunningSave) -> RunningSave:
        """Start to wait for the local save and to copy its files."""
        running = RunningSave(
            self.store,
            local.progress.total_bytes,
            time.perf_counter(),
            self.call.watchdog,
            self.step,
            bytes_per_second=self.bytes_per_second,
            detached=True,
        )
        finish_first()
        work = functools.partial(carry_out, functools.partial(self._run, local), self.attempts, self.on_done)
        with self.call:
            self.call.start(functools.partial(running.run, work))
        running.mark_returned(yields_processors=True)
        self.running = running
        return running

    @property
    def store(self) -> Store:
        return self.destination.store

    @property
    def is_running(self) -> bool:
        """Whether its files are still needed."""
        return self.running is not None and not self.running.done

    def _run(self, local: RunningSave, running: RunningSave, repeated: Call | None = None) -> SaveInfo:
        """Wait for the local save, and copy it. `repeated` is the call of another attempt."""
        call = repeated or self.call
        release_caller()
        with call, contextlib.ExitStack() as transactions:
            with call.rendezvous("preparing to flush a local step") as rendezvous:
                info = local.await_end(call.cancellation.check)
                call.cancellation.check()
                if info is None:
                    raise local.error or AssertionError("no outcome")
                manifest, content = load_manifest(self.source)
                if manifest.save_id != self.save_id:
                    raise DataError(f"{self.source.url} was saved again before it could be flushed to {self.store.url}")
                rendezvous.gather("")
                transaction: Transaction | None = None
                if call.index == 0:
                    with call.watchdog.operation(f"preparing {self.store.url}"):
                        transaction = self.destination.claim(manifest.decoded_stacks, manifest.save_id)
                        transactions.callback(transaction.close)
                rendezvous.broadcast("")
            with call.rendezvous("flushing a local step") as rendezvous:
                owned_bytes = sum(obj.n_bytes for obj in self.owned)
                with rendezvous.joined_by_all(), display_progress("save", owned_bytes, None) as report:
                    require_shared(self.store, manifest.data_folder, call.index)
                    self._copy(manifest, running.rate_limiter, report)
                with call.cancellation.paused():  # the others may still write
                    rendezvous.gather("")
                if transaction is None:
                    call.cancellation.end()  # process 0 may publish from now on
                else:
                    stacks, sync = manifest.decoded_stacks, self.options.sync
                    self.destination.commit(call, transaction, stacks, content, sync=sync)
                rendezvous.broadcast("")
            self.destination.note_saved()
            if transaction is not None:
                transaction.close()
                self.destination.record_published(manifest.step, manifest.save_id, manifest.created)
        return replace(info, path=self.store.url)

    def _copy(self, manifest: Manifest, rate_limiter: RateLimiter, report: Report) -> None:
        """Copy the files that this process owns, each checked."""
        created_folders = set[str]()
        keys = list[str]()
        if manifest.process_states:
            key = f"{manifest.data_folder}/{state_file_name(self.call.index)}"
            self.store.put(key, self._read(key), sync=self.options.sync)
        for obj in self.owned:
            self.call.cancellation.check()
            rate_limiter.wait(obj.n_bytes, self.call.cancellation.check)
            stack = manifest.decoded_stacks[obj.stack]
            keys.append(zarr.object_key(stack, obj.index))
            key = f"{manifest.data_folder}/{keys[-1]}"
            content = self._read(key)
            record = manifest.stacks[obj.stack]
            if problem := problem_of(content, stack, obj.index, *record.length_and_digest(obj.index)):
                raise DataError(f"{self.source.url}/{key} {problem}")
            folder, _, name = key.rpartition("/")
            with self.call.watchdog.operation(f"writing to {self.store.url}"):
                below = self.store.child(folder) if folder in created_folders else self.store.create_child(folder)
                below.put(name, content, sync=self.options.sync)
            created_folders.add(folder)
            report(obj.n_bytes)
        if self.options.sync:
            with self.call.watchdog.operation(f"syncing {self.store.url}"):
                self.store.sync_folders(manifest.data_folder, keys)

    def _read(self, key: str) -> bytes:
        content = self.source.read(key)
        if content is None:
            raise DataError(f"{self.source.url}/{key} is missing, so it cannot be flushed to {self.store.url}")
        return content
