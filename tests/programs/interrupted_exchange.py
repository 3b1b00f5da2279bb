"""Process 1 is interrupted while data is exchanged, or right before; then both processes save and restore again."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from joined import args, process_id
from sharded_tree import check, make, mesh_of

import jaxckpt
from jaxckpt._devices.interconnect import Interconnect
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._pipeline.control import Cancellation
from jaxckpt._save import staging

tree, columns = make(mesh_of(2, 2)), P(None, "data")
options = jaxckpt.Options(timeout_seconds=60, object_bytes=64 << 10, chunk_bytes=16 << 10)
replicate, broadcast, cancel = staging.replicate_box, Rendezvous.broadcast, Cancellation.cancel
cancelled = threading.Event()
exchanged = 0


def interrupt() -> None:
    """In a lane: interrupt the main thread, and wait until it has cancelled the call."""
    cancelled.clear()
    os.kill(os.getpid(), signal.SIGINT)
    assert cancelled.wait(60)


def interrupt_second_exchange(*given: Any) -> jax.Array:
    global exchanged
    exchanged += 1
    if exchanged == 2:
        interrupt()
    return replicate(*given)


def interrupt_claim(rendezvous: Rendezvous, text: str) -> str:
    if rendezvous.what.startswith("looking"):  # process 0 knows that this process is ready
        interrupt()
    return broadcast(rendezvous, text)


def note_cancel(cancellation: Cancellation, error: BaseException) -> None:
    cancel(cancellation, error)
    cancelled.set()


def save(name: str) -> None:
    specs = {**dict.fromkeys(tree, None), "rows": columns, "both": columns}
    try:
        jaxckpt.save(f"{args}/{name}", tree, mesh=mesh_of(2, 2), specs=specs, options=options)
        print(name, "saved", flush=True)
    except (KeyboardInterrupt, jaxckpt.JaxckptError) as error:
        print(name, "raised", type(error).__name__, error, flush=True)


if process_id == 1:
    Cancellation.cancel = note_cancel  # type: ignore[method-assign]
    staging.replicate_box = interrupt_second_exchange
save("exchange")
if process_id == 1:
    staging.replicate_box = replicate
    Rendezvous.broadcast = interrupt_claim  # type: ignore[method-assign]
save("claim")
Rendezvous.broadcast = broadcast  # type: ignore[method-assign]
save("last")


# Restores -------------------------------------------------------------------------------------------------

gather, gathered = Interconnect.gather, 0


def interrupt_second_gather(*given: Any) -> Any:
    global gathered
    gathered += 1
    if gathered == 2:
        interrupt()
    return gather(*given)


def restore(name: str) -> None:
    small = jaxckpt.Options(timeout_seconds=60, read="shared", host_bytes=1 << 20)
    try:
        check(jaxckpt.restore(f"{args}/last", mesh=mesh_of(2, 2), specs=P(), options=small))
        print(name, "restored", flush=True)
    except (KeyboardInterrupt, jaxckpt.JaxckptError) as error:
        print(name, "raised", type(error).__name__, error, flush=True)


agreed = 0


def interrupt_agreement(rendezvous: Rendezvous, text: str) -> str:
    global agreed
    agreed += rendezvous.what == "restoring"
    if agreed == 2:  # process 0 knows that this process is ready for the second round
        agreed += 1
        interrupt()
    return broadcast(rendezvous, text)


if process_id == 1:
    Interconnect.gather = interrupt_second_gather  # type: ignore[method-assign]
restore("shared")
Interconnect.gather = gather  # type: ignore[method-assign]
restore("again")
if process_id == 1:
    Rendezvous.broadcast = interrupt_agreement  # type: ignore[method-assign]
restore("agreement")
Rendezvous.broadcast = broadcast  # type: ignore[method-assign]
restore("at last")
