"""Saves and restores stateful objects in two processes: equal states, different states, and a failure in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from joined import args, process_id

import jaxckpt


class Loader:
    def __init__(self, position: int, order: Any) -> None:
        self.position, self.order = position, order

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.position == -1 and process_id == 1:
            raise RuntimeError("no room")
        self.position, self.order = state["position"], state["order"]


def caught(function: Callable[..., Any], *given: Any) -> str:
    try:
        function(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise SystemExit("nothing was raised")


jaxckpt.save(f"{args}/same", {"data": Loader(5, np.arange(4))})
loader = Loader(0, None)
assert jaxckpt.restore(f"{args}/same", {"data": loader})["data"] is loader
assert loader.position == 5
assert loader.order.tolist() == [0, 1, 2, 3]

for data, leaf in [
    (Loader(process_id, np.arange(4)), "'data/position'"),
    (Loader(5, np.arange(4) + process_id), "'data/order'"),
    (Loader(5, jnp.arange(4) + process_id), "'data/order'"),
    (Loader(5, np.arange(4 + process_id)), "the leaves of the tree"),
]:
    said = caught(jaxckpt.save, f"{args}/refused", {"data": data})
    assert "PeersDisagreeError" in said or process_id, said
    assert leaf in said, said
    assert "process_state=" in said, said

said = caught(jaxckpt.restore, f"{args}/same", {"data": Loader(-1, None)})
assert said == "RuntimeError: no room" if process_id else "no room" in said, said
jaxckpt.restore(f"{args}/same", {"data": loader})  # the job continues

print("all checks passed")
