"""Meetings of 130 processes over JAX's coordination service; one real process simulates all of them in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from jax._src import distributed
from joined import process_id

from jaxckpt._job.call import Call
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._pipeline.watchdog import Watchdog, under

COUNT = 130
assert process_id == 0


def run_rendezvous(name: str, act: Callable[[Rendezvous, int], object], timeout_seconds: float) -> list[object]:
    """The result or the error of each process."""
    outcomes: list[object] = [None] * COUNT

    def run(index: int) -> None:
        client, watchdog = distributed.global_state.client, Watchdog(timeout_seconds)
        prefix = f"jaxckpt/{name}"
        call = Call("save", "/ckpt", watchdog, None, 0, index, COUNT, client, prefix)
        try:
            with under(watchdog), call.rendezvous("testing") as rendezvous:
                outcomes[index] = act(rendezvous, index)
        except Exception as error:
            outcomes[index] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=[index]) for index in reversed(range(COUNT))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def all_arrive(rendezvous: Rendezvous, index: int) -> str:
    received = rendezvous.gather(f"text {index}")
    assert received == ([f"text {other}" for other in range(COUNT)] if index == 0 else [])
    return rendezvous.broadcast("received")


def one_fails(rendezvous: Rendezvous, index: int) -> str:
    if index == 70:
        raise OSError("no space left")
    return all_arrive(rendezvous, index)


def two_do_not_arrive(rendezvous: Rendezvous, index: int) -> str:
    return "absent" if index in (1, 129) else all_arrive(rendezvous, index)


assert run_rendezvous("all", all_arrive, 60) == ["received"] * COUNT

failed = run_rendezvous("fails", one_fails, 60)
assert failed.pop(70) == "OSError: no space left"
assert set(failed) == {"PeerFailedError: process 70 failed with OSError: no space left"}, set(failed)

silent = run_rendezvous("silent", two_do_not_arrive, 4)
assert silent.pop(129) == silent.pop(1) == "absent"
(message,) = set(silent)
assert str(message).startswith("PeerTimeoutError: processes 1, 129 of 130 did not respond for 4 s while testing"), (
    message
)
print("done")
