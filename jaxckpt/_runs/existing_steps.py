"""Steps that were there before a Checkpointer, and that its rules would delete: it gives notice before it deletes them.

    _run/rules.json      {"rules": "…", "existing": [10, 20]}      the rules of the last Checkpointer that deleted steps

A Checkpointer with other rules than the last one names the steps that they do not keep in a warning when it restores a
step, and deletes them only after it has saved one. With the same rules, nothing is said: a resumed run continues.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import msgspec

from jaxckpt._pipeline.lane_log import log as _log
from jaxckpt._run_folder.steps import RUN, read_note
from jaxckpt._runs.retention import RetentionPolicy
from jaxckpt._store.store import Store
from jaxckpt.errors import CorruptError, StorageError, show_count

RULES = "rules.json"


class _Record(msgspec.Struct, frozen=True):
    rules: str
    existing: list[int]


class ExistingSteps:
    """The steps that were there before. Process 0, in a lane."""

    def __init__(self, run: Store, policy: RetentionPolicy, *, keep: bool) -> None:
        """With `keep`, no rule deletes them."""
        self._run = run
        self._rules = f"{replace(policy, keep_if=None)!r}, {policy.keep_if is not None}, {keep}"
        self._keep = keep
        self._steps = frozenset[int]()
        self._is_known = self._is_deletable = False

    def find(self, steps: Collection[int]) -> None:
        """Note which steps exist when the Checkpointer is created."""
        self._steps = frozenset(steps)

    def spared(self, unwanted: Collection[int], *, has_saved: bool) -> frozenset[int]:
        """Of the steps that no rule keeps, those that must not be deleted yet, or never. `has_saved` is whether this
        Checkpointer has published a step since the last call."""
        if not self._is_known:
            self._is_known = True
            if (recorded := self._read()) is not None:
                self._is_deletable, self._steps = not self._keep, frozenset(recorded)
                return self._steps if self._keep else frozenset()
            self._give_notice(sorted(self._steps.intersection(unwanted)))
        self._is_deletable = self._is_deletable or (has_saved and not self._keep)
        return frozenset() if self._is_deletable else self._steps

    def _give_notice(self, steps: list[int]) -> None:
        if steps and not self._keep:
            shown = ", ".join(map(str, steps[:10])) + (", …" if len(steps) > 10 else "")
            _log.warning(
                "the keep_ rules of %s are new, and do not keep %s that existed before: %s. They are deleted after the"
                " first save; Checkpointer(keep_existing=True) keeps them, and so does a pin",
                self._run.url,
                show_count(len(steps), "step"),
                shown,
            )
        self.record()

    def record(self) -> None:
        """Note the rules in the run, so that the next Checkpointer with the same rules gives no notice."""
        record = _Record(self._rules, sorted(self._steps) if self._keep else [])
        try:
            self._run.create_child(RUN).replace(RULES, msgspec.json.encode(record))
        except StorageError:  # the next Checkpointer gives notice again
            return

    def _read(self) -> list[int] | None:
        """The steps that the last Checkpointer kept because they existed before it; None if its rules were others."""
        try:
            record = read_note(self._run, RULES, _Record)
        except (CorruptError, StorageError):
            return None
        return record.existing if record is not None and record.rules == self._rules else None
