"""Converts a small checkpoint, then a large one; prints by how many bytes the large one raised the peak memory.

Arguments: the small one, the large one, the destination, the format, Options in JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jaxckpt


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10


small, large, destination, form, options = sys.argv[1:]
given = jaxckpt.Options(**json.loads(options))
jaxckpt.convert(small, destination, format=form, overwrite=True, options=given)
before = peak_bytes()
jaxckpt.convert(large, destination, format=form, overwrite=True, options=given)
print(peak_bytes() - before)
