"""Compares the arguments that all processes must give their Checkpointers alike."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from jaxckpt._job.rendezvous import Rendezvous, process_names
from jaxckpt.errors import PeersDisagreeError


def compare(rendezvous: Rendezvous, settings: Mapping[str, Any]) -> Sequence[str]:
    """Compare the settings, JSON values by name. Returns the name of each process's host in process 0, and nothing in
    the others. Every process calls this; process 0 raises PeersDisagreeError."""
    sent = list(map(json.loads, rendezvous.gather(json.dumps([settings, socket.gethostname()]))))
    for name, first in settings.items():
        differing = {process: values[name] for process, (values, _) in enumerate(sent) if values[name] != first}
        if differing:
            raise PeersDisagreeError(
                f"{process_names([*differing])} created the Checkpointer with {name}={next(iter(differing.values()))},"
                f" process 0 with {name}={first}: every process must give the same arguments"
            )
    return [host for _, host in sent]
