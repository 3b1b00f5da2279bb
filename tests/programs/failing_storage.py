"""Training on storage that fails in bursts. One line for each round: what is wrong, or "all accounted for".

Arguments: a directory; "full" (ENOSPC, small file system), "refused" (EFBIG), "broken" (EIO, by failing_calls.c) or
"local" (likewise, with local steps); and the rounds as JSON: each has a policy, a seed, and whether the last burst is
long.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import bursts
import numpy as np

import jaxckpt

OPTIONS = jaxckpt.Options(sync=False)
if __name__ == "__main__":
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    shutil.rmtree(folder / "warm", ignore_errors=True)
    with jaxckpt.Checkpointer(folder / "warm", options=OPTIONS) as warm:  # imports everything
        warm.save(1, {"w": np.zeros(3)})
        warm.restore()
    match kind:
        case "full":
            refuse = bursts.fill(folder / "ballast")
        case "broken" | "local":
            refuse = bursts.failing_calls(Path(os.environ["FAILING_CALLS"]))
        case _:
            refuse = bursts.refuse_files
    for policy, seed, is_long in json.loads(sys.argv[3]):
        more: dict[str, Any] = {}
        for name in ("run", "local"):
            shutil.rmtree(folder / name, ignore_errors=True)
        if kind == "local":
            more = {"every": 2, "local": jaxckpt.LocalTier(folder / "local", every=1, copies=0)}
        print(bursts.train(str(folder / "run"), policy, seed, refuse, OPTIONS, is_long=is_long, **more), flush=True)
