"""A checkpoint on an object store: claimed and published by conditional writes.

There a key is written whole or not at all, and a write can be made to depend on what the key holds. Nothing else can
be relied on: no locks, no renames, no folders. So

- a save is published by a conditional write of the manifest,
- whether a save may publish is settled at one key, the note of its writer: the writer turns it from "writing" to
  "publishing", publishes, and turns it to "published"; who deletes its data turns it to "swept" before that; each only
  in the place of what it has read, so one of them fails.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import tensorstore as ts

from jaxckpt._format import zarr
from jaxckpt._format.names import MANIFEST, WRITER, is_data, may_name, names_data
from jaxckpt._format.stacks import Stack
from jaxckpt._runtime.errors import StorageError
from jaxckpt._storage.bucket_objects import BucketObjects
from jaxckpt._storage.claims import overtaken
from jaxckpt._storage.store import Writer

MARKS = "_steps/"
"""Keys below it name the folders of a directory that hold checkpoints: listing all keys would cost a request for each
thousand objects. A mark is made before the checkpoint is published, so it alone says nothing."""

_PROBE = "probe"
_RACERS = 4


@dataclass(frozen=True, slots=True)
class Bucket(BucketObjects):
    """The keys of one checkpoint on an object store."""

    # Claim and publish ------------------------------------------------------------------------------------

    def begin(self, save_id: str, previous: bytes | None) -> Writer:
        data = f"data-{save_id}"
        key = f"{data}/{WRITER}"
        note = {"state": "writing", "save_id": save_id, "host": socket.gethostname(), "pid": os.getpid()}
        content = json.dumps({**note, "replaces": _identity(previous)}).encode()
        if not self._exchange(key, self._get(key)[1], content):
            raise StorageError(errno.EEXIST, f"cannot create {self.url}/{key}: it exists already")
        try:
            self._require_conditions(f"{data}/{_PROBE}")
        except BaseException:
            self.delete(data)
            raise
        return Writer(self, data)

    def _exchange(self, key: str, generation: bytes, content: bytes) -> bool:
        """Write a key if it still holds what was read with `generation`. Content must be the writer's own."""
        with self._refused("write", key):
            stamp = self._keys.write(key, content, if_equal=generation).result()
        # An empty generation means that the condition failed, unless it was our own write whose answer was lost.
        return bool(stamp.generation) or self.read(key) == content

    def _turn(self, data: str, before: Collection[str], after: str) -> bool:
        """Turn the note of a writer from one state to another, unless somebody else was faster."""
        key = f"{data}/{WRITER}"
        content, generation = self._get(key)
        note = _note(content)
        if content is not None and not note:
            raise StorageError(errno.EIO, f"cannot read {self.url}/{key}: it is no writer's note")
        if note.get("state") not in before:
            return note.get("state") == after
        return self._exchange(key, generation, json.dumps({**note, "state": after}).encode())

    def create_array(self, data: str, stack: Stack) -> None:
        self.put(f"{data}/{stack.name}/zarr.json", zarr.metadata(stack))

    def publish(self, data: str, manifest: bytes, previous: bytes | None, *, sync: bool) -> None:
        found, generation = self._get(MANIFEST)
        if found != previous:
            raise overtaken(self.url)
        # What is published already, and now without some leaves, has no writer any more.
        by_writer = not names_data(previous, data)
        if by_writer and not self._turn(data, ["writing"], "publishing"):
            raise overtaken(self.url)
        if not self._exchange(MANIFEST, generation, manifest):
            raise overtaken(self.url)
        if by_writer:
            self._require_unswept(data, manifest, previous)

    def _require_unswept(self, data: str, manifest: bytes, previous: bytes | None) -> None:
        """Take back what was just published if its data was swept meanwhile.

        It was if another save took this one's place, and was itself deleted since: so only if this one found nothing
        there to replace. A note that cannot be read says nothing, and what is published stays.
        """
        with contextlib.suppress(StorageError):
            if self._turn(data, ["publishing"], "published"):
                return
        content = self.read(f"{data}/{WRITER}")
        if previous is not None or (content is not None and _note(content).get("state") != "swept"):
            return
        found, generation = self._get(MANIFEST)
        if found == manifest:
            with self._refused("delete", MANIFEST):
                self._keys.write(MANIFEST, None, if_equal=generation).result()
        raise overtaken(self.url)

    def unpublish(self, *, sync: bool) -> None:
        self.remove(MANIFEST)

    def give_up(self, data: str) -> None:
        """What was about to be published may yet appear, if only its answer was lost: left for a later sweep."""
        if self._turn(data, ["writing"], "swept"):
            self.delete(data)

    def sweep(self, current: str | None) -> bool:
        """A save that meant to replace another manifest than the present one can never publish."""
        return self._sweep(current, all_writers=False)

    def clear(self, *, evict: bool = True) -> None:
        """A live writer learns from its note that its data is gone. Nothing shows whether it lives."""
        if evict:
            self._sweep(None, all_writers=True)

    def _sweep(self, current: str | None, *, all_writers: bool) -> bool:
        left = False
        for name in self._data_folders():
            if name == current:
                continue
            content = self.read(f"{name}/{WRITER}")
            # Asked last: it may have been published since we listed it.
            manifest = self.read(MANIFEST)
            if may_name(manifest, name):
                continue
            note = _note(content)
            if content is not None and not note:
                left = True  # anybody may have written it
                continue
            no_writer = content is None or note.get("state") in ("published", "swept")
            outdated = all_writers or note.get("replaces") != _identity(manifest)
            if no_writer or (outdated and self._turn(name, ["writing", "publishing"], "swept")):
                self.delete(name)
            else:
                left = True
        return left

    def _data_folders(self) -> list[str]:
        found = {f"data-{key.partition('/')[0]}" for key in self._list("data-")}
        return sorted(name for name in found if is_data(name))

    def trim(self, data: str, stacks: Iterable[Stack]) -> None:
        named = {stack.name for stack in stacks}
        folder = self.child(data)
        for name in {key.partition("/")[0] for key in self._list(f"{data}/") if "/" in key}:
            if name not in named:
                folder.delete(name)

    def sync_folders(self, data: str, stack: Stack, indices: Iterable[tuple[int, ...]]) -> None:
        pass  # what is put is durable

    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        pass

    def _require_conditions(self, key: str) -> None:
        """Raise StorageError if the server ignores the conditions of writes. Once for a process and bucket.

        Several writes race to create a key, then to replace it, of which one may win each time. One after the other
        would show nothing: tensorstore asks with a HEAD whether the condition holds before it writes.
        """
        if self.spec in _proven:
            return
        for header in ("If-None-Match", "If-Match"):
            if self._race(key) > 1:
                raise StorageError(
                    errno.EOPNOTSUPP,
                    f"cannot save to {self.url}: the server ignores the condition {header} of writes, without which two"
                    " saves could publish at once, and mix. Use a server that honours it, as Amazon S3 and Google Cloud"
                    " Storage do",
                )
        self.remove(key)
        _proven.add(self.spec)

    def _race(self, key: str) -> int:
        """Write a key several times at once, each in the place of what it holds now; how many succeeded."""
        generation = self._get(key)[1]
        with self._refused("write", key):
            # Each its own: on S3 the generation is a digest of the content.
            racers = [self._keys.write(key, uuid.uuid4().hex, if_equal=generation) for _ in range(_RACERS)]
            return sum(bool(racer.result().generation) for racer in racers)

    # The directory that it is -----------------------------------------------------------------------------

    def anchored(self) -> Self:
        return self

    def is_file(self) -> bool:
        return False  # a key of that name takes no room from the keys below

    def names(self) -> list[str]:
        """Costs a request for each thousand keys below."""
        return sorted({key.partition("/")[0] for key in self._list("")} - {""})  # which S3's console makes of a folder

    def _list(self, prefix: str) -> list[str]:
        """The keys below a prefix, without it."""
        until = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
        with self._refused("list", prefix):
            found = self._keys.list(ts.KvStore.KeyRange(prefix, until), strip_prefix_length=len(prefix)).result()
        return [key.decode(errors="replace") for key in found]

    def folders(self) -> dict[str, bool]:
        """One request, and one for each mark."""
        names = sorted(self._list(MARKS))
        heads = [self._keys.read(f"{name}/{MANIFEST}", byte_range=slice(0, 0)) for name in names]
        with self._refused("read", MANIFEST):
            return {name: head.result().state == "value" for name, head in zip(names, heads, strict=True)}

    def child(self, name: str) -> Self:
        return replace(self, url=f"{self.url}/{name}", path=f"{self.path}{name}/")

    def above(self) -> tuple[Self, str] | None:
        path, _, name = self.path.rstrip("/").rpartition("/")
        url = self.url.rpartition("/")[0]
        return (replace(self, url=url, path=f"{path}/" if path else ""), name) if name else None

    def mark(self, name: str) -> None:
        self.put(f"{MARKS}{name}", b"{}")

    def unmark(self, name: str) -> None:
        self.remove(f"{MARKS}{name}")

    def delete(self, name: str) -> None:
        with self._refused("delete", name):
            self._keys.delete_range(ts.KvStore.KeyRange(f"{name}/", f"{name}0")).result()


_proven: set[str] = set()  # stores that were seen to honour conditions, by driver, endpoint and bucket


def _note(content: bytes | None) -> dict[str, Any]:
    """A writer's note, which may be anything."""
    try:
        found = json.loads(content or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _identity(manifest: bytes | None) -> str | None:
    return None if manifest is None else hashlib.sha256(manifest).hexdigest()
