"""A process whose first call with device arrays is interrupted; it then saves, restores and compares.

python interrupted.py CALL PATH SECONDS

Prints how the first call ended, as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

import jaxckpt

faulthandler.enable()
call, path, delay = sys.argv[1], sys.argv[2], float(sys.argv[3])
if call in ("restore", "load_numpy"):  # by another process, before this one uses the device
    pid = os.fork()
    if pid == 0:
        host = {"w": np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024), "b": np.ones(7, np.float32), "step": 3}
        jaxckpt.save(path, host)
        os._exit(0)
    os.waitpid(pid, 0)
tree = {"w": jnp.arange(1 << 20, dtype=jnp.float32).reshape(1024, 1024), "b": jnp.ones(7), "step": 3}
calls = {
    "save": lambda: jaxckpt.save(path, tree),
    "save_async": lambda: jaxckpt.save_async(path, tree).wait(),
    "restore": lambda: jaxckpt.restore(path, tree),
    "load_numpy": lambda: jaxckpt.load_numpy(path),
}
timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
outcome = "ended"
try:
    timer.start()
    calls[call]()
    timer.join()
except KeyboardInterrupt:
    outcome = "interrupted"
timer.join()
jaxckpt.save(path, tree, overwrite=True)
back = jaxckpt.restore(path, jax.tree.map(jnp.zeros_like, tree) | {"step": 0})
assert bool((back["w"] == tree["w"]).all())
assert back["step"] == 3
with jaxckpt.Checkpointer(path + "-run", keep_last=1) as run:
    run.save(1, tree)
print(json.dumps({call: outcome}), flush=True)
