"""examples/training_loop.py in the processes of a job, of which process 1 receives SIGTERM in a step; 0: in none."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import training_loop
from joined import args, process_id

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # the example sets 8 when it is imported
folder, steps, stop = Path(args[0]), args[1], args[2]


class Stopped(training_loop.jaxckpt.Checkpointer):
    def save(self, step: int, *rest: Any, **named: Any) -> Any:
        if step == stop and process_id == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if 0 < stop <= step:
            time.sleep(0.1)  # JAX's preemption service has seconds to pass it on before the last step
        return super().save(step, *rest, **named)


training_loop.jaxckpt.Checkpointer = Stopped
training_loop.train(folder, steps)
