"""Lost work per day in a large job, with and without the local tier, by simulation.

    python benchmarks/lost_work.py [--hosts 1024] [--state-gb 5670] [--days 20000]

Hosts fail at random, as often as in the training of Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384
GPUs, which are 2,048 hosts (The Llama 3 Herd of Models, 2024, section 3.3.4,
https://arxiv.org/abs/2407.21783). The state is that of a model of 405 billion parameters with Adam: 14 bytes per
parameter.

Lost work is all time that the job does not spend on new steps: the seconds that saves block the job, repeated steps
after a failure, and the restore. It excludes the time to detect a failure and to start processes, which is the same
with and without the tier. The simulation is first compared with Daly's exact formula (A higher order estimate of the
optimum checkpoint interval for restart dumps, 2006, equation 13), for saves that block until they end.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass

DAY = 86_400.0
HOST_DAYS_PER_FAILURE = 2048 * 54 / 419


@dataclass(frozen=True, slots=True)
class Tier:
    """How steps are saved to one place and restored from it. All values are in seconds."""

    interval: float
    """Time of training work between two saves."""

    blocked: float
    """How long a save stops the training."""

    behind: float
    """Time from the end of that stop until the save is published."""

    restore: float


@dataclass(frozen=True, slots=True)
class Lost:
    """Lost seconds per day."""

    saving: float
    repeated: float
    restoring: float

    @property
    def all(self) -> float:
        return self.saving + self.repeated + self.restoring


def young(blocked: float, between_failures: float) -> float:
    """The best interval by Young's formula (1974)."""
    return math.sqrt(2 * blocked * between_failures)


def daly(tier: Tier, between_failures: float) -> float:
    """Lost seconds per day by Daly's formula, for a save that blocks until it is published."""
    m = between_failures
    wall = m * math.exp(tier.restore / m) * math.expm1((tier.interval + tier.blocked) / m) / tier.interval
    return DAY * (1 - 1 / wall)


def simulate(
    storage: Tier, local: Tier | None, *, between_failures: float, hosts: int, both_lost: float, days: float, seed: int
) -> Lost:
    """Simulate one failure after another. With a local tier, a failure falls back to the storage's step if it takes two
    hosts that hold the same objects at once (`both_lost`), or if it takes the only other holder before the next local
    save."""
    chance = random.Random(seed)
    tier = local or storage
    elapsed = work = in_storage = in_tier = 0.0
    saving = restoring = 0.0
    protected = True
    while elapsed < days * DAY:
        up = chance.expovariate(1 / between_failures)
        elapsed += up
        neighbours = 0.0 if protected else 2 / (hosts - 1)
        from_storage = local is None or chance.random() < both_lost + neighbours
        begin = in_storage if from_storage else in_tier
        restore = storage.restore if from_storage else tier.restore
        restoring += min(up, restore)
        protected = False
        if up <= restore:
            continue
        left = up - restore
        cycle = tier.interval + tier.blocked
        # A step counts from its publication, which follows the time that its save blocks.
        done = max(0, math.floor((left - tier.behind) / cycle))
        in_tier = begin + done * tier.interval
        protected = done > 0 or not restore
        every = max(1, round(storage.interval / tier.interval))
        flushed = max(0, math.floor((left - storage.behind) / (every * cycle))) * every
        in_storage = max(in_storage if not from_storage else begin, begin + flushed * tier.interval)
        saving += math.floor(left / cycle) * tier.blocked
        work = in_tier
    repeated = elapsed - work - saving - restoring
    per_day = DAY / elapsed
    return Lost(saving * per_day, repeated * per_day, restoring * per_day)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1024)
    parser.add_argument("--state-gb", type=float, default=5670, help="size of the state, in 10^9 bytes")
    parser.add_argument("--blocked", type=float, default=2, help="seconds that a save blocks the job")
    parser.add_argument("--copy-gb-s", type=float, default=25, help="rate of a host to its peer and from its folder")
    parser.add_argument("--both-lost", type=float, default=0.01, help="share of failures that take both holders")
    parser.add_argument("--days", type=float, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    apart = HOST_DAYS_PER_FAILURE * DAY / arguments.hosts
    share = arguments.state_gb / arguments.hosts
    print(f"{arguments.hosts} hosts, {share:.1f} GB of state each, {DAY / apart:.2f} failures per day\n")

    def run(storage: Tier, local: Tier | None) -> Lost:
        return simulate(
            storage,
            local,
            between_failures=apart,
            hosts=arguments.hosts,
            both_lost=arguments.both_lost,
            days=arguments.days,
            seed=arguments.seed,
        )

    print("| blocking time, interval | simulated | Daly's formula | difference |")
    print("|---|---|---|---|")
    for blocked, interval in ((30.0, young(30, apart)), (120.0, young(120, apart)), (120.0, 3600.0)):
        tier = Tier(interval, blocked, 0, 300)
        found, exact = run(tier, None).all, daly(tier, apart)
        print(
            f"| {blocked:.0f} s, {interval / 60:.0f} min | {found / 60:.1f} min per day | {exact / 60:.1f} min per day"
            f" | {found / exact - 1:+.1%} |"
        )

    print("\n| storage | storage interval | without local tier | with local tier | saves, repeated steps, restores |")
    print("|---|---|---|---|---|")
    copy = share / arguments.copy_gb_s
    best = young(arguments.blocked + copy, apart)
    local = Tier(best, arguments.blocked + copy, 2 * copy, 4 * copy)
    for rate in (10, 50, 200):
        moves = arguments.state_gb / rate
        for interval in (max(young(arguments.blocked, apart), moves), 3600.0):
            storage = Tier(interval, arguments.blocked, moves, moves)
            without, tiered = run(storage, None), run(storage, local)
            print(
                f"| {rate} GB/s | {interval / 60:.0f} min | {without.all / 60:.0f} min per day"
                f" | {tiered.all / 60:.0f} min per day"
                f" | {tiered.saving / 60:.1f}, {tiered.repeated / 60:.1f}, {tiered.restoring / 60:.1f} |"
            )


if __name__ == "__main__":
    main()
