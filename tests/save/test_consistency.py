"""Which values the processes compare, and when."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt
from jaxckpt._save import consistency as agreement
from jaxckpt._save import staging
from jaxckpt._save.describe import describe
from jaxckpt._save.write_plan import plan_save


@pytest.mark.one_device
@pytest.mark.parametrize(("memory", "copied"), [("auto", ""), ("pinned", ""), ("pageable", "ab")])
def test_a_save_does_not_wait_for_the_values_that_it_compares(
    memory: Any, copied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU device simulates an accelerator of two processes."""
    read: list[str] = []
    text = agreement._ComparedValue.text
    monkeypatch.setattr(agreement._ComparedValue, "text", lambda one: read.append(one.path) or text(one))
    monkeypatch.setattr(staging, "is_in_host_memory", lambda value: False)
    monkeypatch.setattr(agreement, "processes_of", lambda sharding: frozenset({0, 1}))
    device, options = jax.devices()[1 % len(jax.devices())], jaxckpt.Options(staging_memory=memory)
    counts = {name: jax.device_put(np.int32(number), device) for number, name in enumerate("abc")}
    counts["c"] = jax.device_put(counts["c"], jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))
    draft = describe({**counts, "step": 7}, None, None, options)
    own = agreement.OwnFingerprint.of(draft, plan_save(draft.arrays, options, 0, 2), None, None, 0)
    assert sorted(read) == ["c", "step"], "only values that are already in host memory"
    assert {entry.path for entry in own.values if isinstance(entry.value, np.ndarray)} == set(copied)
    jax.jit(lambda x: x + 1, donate_argnums=0)(counts["a"])
    for count in counts.values():
        count.delete()
    _, groups = own.complete()
    values = dict(value for group in groups for value in group.values)
    assert values == {"step": "7", "a": "0", "b": "1", "c": "2"}
