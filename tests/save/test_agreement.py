"""Which values the processes compare, and when."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt
from jaxckpt._save import agreement
from jaxckpt._save.describe import describe
from jaxckpt._save.plan import plan_save


def test_a_save_does_not_wait_for_the_values_that_it_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU device simulates an accelerator of two processes."""
    monkeypatch.setattr(agreement, "is_in_host_memory", lambda value: False)
    monkeypatch.setattr(agreement, "_processes", lambda sharding: frozenset({0, 1}))
    may_end = threading.Event()

    def wait(x: Any) -> Any:
        assert may_end.wait(60)
        return x

    step = jax.jit(lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.int32), x))
    options = jaxckpt.Options()
    counts = {name: step(jax.device_put(np.int32(number), jax.devices()[1])) for number, name in enumerate("ab")}
    draft = describe({**counts, "step": 7}, None, None, options)
    complete = agreement.compute_fingerprint(draft, plan_save(draft.arrays, options, 0, 2), None, None, 0)
    may_end.set()
    jax.jit(lambda x: x + 1, donate_argnums=0)(counts["b"])
    counts["a"].delete()
    _, groups = complete()
    assert [group.values for group in groups] == [[("step", "7")], [("a", "0"), ("b", "1")]]
