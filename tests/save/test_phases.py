"""The phases of a save add up to its duration, also if each request to the storage takes long."""

from __future__ import annotations

import numpy as np
import pytest
import servers
from servers import Bucket

import jaxckpt


@pytest.mark.child
def test_the_phases_add_up_to_the_whole_with_a_slow_server(bucket: Bucket) -> None:
    tree = {"w": np.ones(1000)}
    jaxckpt.save(f"{bucket.url}/warm", tree)
    bucket.proxy.on(".*", servers.slow(0.1))
    new = jaxckpt.save(f"{bucket.url}/slow", tree)
    replaced = jaxckpt.save_async(f"{bucket.url}/slow", tree, overwrite=True).wait()
    for info in (new, replaced):
        assert info.seconds > 0.8
        assert 0.9 * info.seconds < sum(info.phase_seconds.values()) <= 1.01 * info.seconds, info
