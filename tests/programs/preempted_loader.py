"""Trains with a DataLoader of PyTorch; SIGTERM reaches its workers too, between two steps: `FOLDER ignores|dies`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import torch

import jaxckpt


class Numbers(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for number in range(1000):
            time.sleep(0.01)
            yield number


def ignore_sigterm(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    folder, how = sys.argv[1:]
    if os.getpgrp() != os.getpid():
        os.setpgrp()  # the signal must not reach the tests
    batches = torch.utils.data.DataLoader(
        Numbers(), batch_size=4, num_workers=2, worker_init_fn=ignore_sigterm if how == "ignores" else None
    )
    with jaxckpt.Checkpointer(folder, every=1000) as checkpoints:
        for step, batch in enumerate(batches, 1):
            checkpoints.save(step, {"x": batch.numpy()})
            if step == 7:
                os.killpg(0, signal.SIGTERM)
                time.sleep(0.3)
