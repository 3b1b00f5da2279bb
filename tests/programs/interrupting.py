"""What the programs that interrupt an operation at every point share."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import jax
import numpy as np


class Interrupt:
    """Sends SIGINT to the main thread at the nth point where Python checks for signals: at the start of a Python
    function, or at the return of a C function."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.seen = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return"):
            if self.seen == self.at:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)
            self.seen += 1


def require_complete(tree: Any, steps: set[int]) -> None:
    """Check that all leaves have the value of one of these steps."""
    found = {int(value) for leaf in jax.tree.leaves(tree) for value in np.unique(leaf)}
    assert len(found) == 1, found
    assert found <= steps, (found, steps)
