"""How long save_async keeps the caller: against a blocking save of the same tree, and against Orbax's, in one run.

    python benchmarks/async_save.py [--rounds 7] [--dir DIR]

Two trees on 8 simulated CPU devices (a 2×4 mesh, P("a", "b")): 1 GiB in 16 leaves of 64 MiB, and 2,000 leaves of
64 KiB. Contestants run one after the other in every round, in alternating order, each after its predecessor is on
disk and dirty pages are flushed, untimed. Ratios are taken within a round; the table shows medians. A first, untimed
round warms up, compiles, and checks that what was saved is what the arrays held when the call was made, a donating
step having run right after it.

"blocked" is the time until the call returns; "next step" a jitted step that donates the whole tree and adds 1 to it,
started at that moment: arrays that are held cannot be overwritten in place, so the step needs fresh memory, and it
shares the cores with the writing. It stands beside the same step with nothing being saved.

Durability: defaults of both libraries; see small_leaves.py. Freed memory stays with the process; see steady.py.
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import steady

steady.begin()

import jax
import numpy as np
import orbax.checkpoint as ocp
import report
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table
from small_leaves import make_tree, remove

import jaxckpt

Tree = Any
BLOCKING, OURS, ORBAX, ORBAX_BLOCKING = "jaxckpt.save", "jaxckpt.save_async", "Orbax, async", "Orbax, blocking"


def large_tree(leaves: int = 16) -> Tree:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("a", "b"))
    rng = np.random.default_rng(0)
    return {f"leaf_{n:02d}": jax.device_put(rng.random((4096, 4096), np.float32), sharding) for n in range(leaves)}


step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)


def savers(folder: Path) -> dict[str, Callable[[Path, Tree], Callable[[], object]]]:
    """For each contestant: a call that returns when the caller may go on, and gives a call that waits for the rest."""
    orbax_async = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    orbax_blocking = ocp.PyTreeCheckpointer()

    def ours(path: Path, tree: Tree) -> Callable[[], object]:
        return jaxckpt.save_async(path, tree).wait

    def blocking(path: Path, tree: Tree) -> Callable[[], object]:
        jaxckpt.save(path, tree)
        return lambda: None

    def orbax(path: Path, tree: Tree) -> Callable[[], object]:
        orbax_async.save(path, args=ocp.args.PyTreeSave(tree))
        return orbax_async.wait_until_finished

    def orbax_sync(path: Path, tree: Tree) -> Callable[[], object]:
        orbax_blocking.save(path, tree)
        return lambda: None

    return {BLOCKING: blocking, OURS: ours, ORBAX_BLOCKING: orbax_sync, ORBAX: orbax}


def measure(name: str, tree: Tree, folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    contestants = savers(folder)
    found: dict[str, list[dict[str, float]]] = {contestant: [] for contestant in contestants}
    for number in range(rounds + 1):
        order = list(contestants) if number % 2 else list(reversed(contestants))
        for contestant in order:
            path = folder / f"{name}-{contestant.replace(' ', '-')}"
            remove(path)
            os.sync()
            jax.block_until_ready(tree)
            wanted = jax.tree.map(np.array, tree) if number == 0 and contestant == OURS else None
            begun = time.perf_counter()
            wait = contestants[contestant](path, tree)
            returned = time.perf_counter()
            tree = jax.block_until_ready(step(tree))
            stepped = time.perf_counter()
            wait()
            ended = time.perf_counter()
            begun_step = time.perf_counter()
            tree = jax.block_until_ready(step(tree))
            step_alone = time.perf_counter() - begun_step
            if wanted is not None:
                got = jaxckpt.load_numpy(path)
                assert all(jax.tree.leaves(jax.tree.map(np.array_equal, wanted, got))), "not what was saved"
            if number:
                found[contestant].append(
                    {
                        "blocked": returned - begun,
                        "next step": stepped - returned,
                        "in all": ended - begun,
                        "step alone": step_alone,
                    }
                )
    return found


def table(name: str, found: dict[str, list[dict[str, float]]]) -> Table:
    shown = Table(title=f"{name} (medians of {len(found[OURS])} rounds, ms)")
    for column in ("", "blocked", "of jaxckpt.save", "next step", "step alone", "in all"):
        shown.add_column(column, justify="right" if column else "left")
    for contestant, rounds in found.items():
        ratios = [one["blocked"] / base["blocked"] for one, base in zip(rounds, found[BLOCKING], strict=True)]
        median = {key: statistics.median(one[key] for one in rounds) * 1e3 for key in rounds[0]}
        shown.add_row(
            contestant,
            f"{median['blocked']:.1f}",
            f"{100 * statistics.median(ratios):.1f} %",
            f"{median['next step']:.0f}",
            f"{median['step alone']:.0f}",
            f"{median['in all']:.0f}",
        )
    return shown


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # Orbax tells of each save
    seconds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="async_save.") as name:
        folder = Path(name).resolve()
        surroundings = report.surroundings(folder)
        for tree, make in (("1 GiB in 16 leaves", large_tree), ("2,000 leaves of 64 KiB", lambda: make_tree(2000))):
            seconds[tree] = measure(tree.replace(",", "").replace(" ", "-"), make(), folder, arguments.rounds)
            report.console.print(table(tree, seconds[tree]))
    report.write("async_save", {"rounds": arguments.rounds, **surroundings, "seconds": seconds}, arguments.json)


if __name__ == "__main__":
    main()
