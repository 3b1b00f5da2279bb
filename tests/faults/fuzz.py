"""Feed forged checkpoints to the library until the time is up, and record how each one ended.

    python tests/faults/fuzz.py FOLDER SECONDS [SEED [CHECKPOINT...]]

With CHECKPOINTs, which are small ones of other libraries, the inputs are their files, damaged.

Coverage guides the search if atheris is installed (a wheel for Linux on x86-64); otherwise new kinds of errors do. This
program runs in a separate process, because the bugs that it looks for can end the process. It writes
FOLDER/outcomes.json after every 50 inputs and at the end. It keeps each input with a forbidden outcome in
FOLDER/crash-*.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import random
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
GROWTH_BYTES = 256 << 20
"""The most memory that reading one input may take. Inputs are under 64 KiB."""

DATA_BYTES = 6 << 30
"""Limit of the process's data memory, so that a decompression bomb raises MemoryError."""

SECONDS = 20
"""The longest time that one input may take, on a busy machine."""

try:
    import atheris
except ImportError:
    atheris = None


class Session:
    """One run: the inputs tried, and their outcomes."""

    def __init__(self, folder: Path, seconds: float, checkpoints: list[str]) -> None:
        self.folder = folder
        self.seconds = seconds
        self.outcomes = collections.Counter[str]()
        self.begun = time.monotonic()
        self.range = foreign_files.Range(folder, checkpoints) if checkpoints else hostile.Range(folder)
        self.seeds = self.range.seeds()
        for case in self.seeds:  # warm-up, so that first-time imports and caches do not count as growth
            self.range.attempt(case)
        self.peak_bytes = 0
        hostile.forget_peak()
        self.base_bytes = hostile.peak_bytes()

    def attempt(self, case: bytes) -> str:
        hostile.forget_peak()
        before = hostile.peak_bytes()
        try:
            with hostile.at_most(SECONDS):
                outcome = self.range.attempt(case)
            taken = hostile.peak_bytes() - before
            assert taken < GROWTH_BYTES, f"took {taken >> 20} MiB"
            self.peak_bytes = max(self.peak_bytes, taken)
        except BaseException:
            name = self.folder / f"crash-{hashlib.sha256(case).hexdigest()[:12]}"
            name.write_bytes(case)
            name.with_suffix(".txt").write_text(traceback.format_exc()[-4000:])
            outcome = "crash"
        self.outcomes[outcome] += 1
        if sum(self.outcomes.values()) % 50 == 0:
            self.write()
        return outcome

    def write(self) -> None:
        report: dict[str, Any] = {
            "outcomes": self.outcomes,
            "peak_bytes": self.peak_bytes,
            "kept_bytes": hostile.peak_bytes() - self.base_bytes,
            "seconds": round(time.monotonic() - self.begun, 1),
            "guided": atheris is not None,
        }
        fresh = self.folder / "outcomes.tmp"
        fresh.write_text(json.dumps(report))
        fresh.rename(self.folder / "outcomes.json")


def guided(session: Session, seed: int) -> None:
    """Fuzz with libFuzzer through atheris: it keeps and mutates inputs that reach new lines. Never returns."""
    corpus = session.folder / "corpus"
    corpus.mkdir()
    for number, case in enumerate(session.seeds):
        (corpus / f"seed-{number}").write_bytes(case)

    def one_input(case: bytes) -> None:
        session.attempt(case)
        if time.monotonic() - session.begun > session.seconds:
            session.write()
            os._exit(0)

    def mutator(case: bytes, max_size: int, mutation_seed: int) -> bytes:
        draw = random.Random(mutation_seed)
        made = atheris.Mutate(case, max_size) if draw.random() < 0.1 else session.range.mutated(case, draw)
        return made if len(made) <= max_size else case

    arguments = [f"-seed={seed or 1}", "-max_len=65536", "-rss_limit_mb=8192", "-timeout=60", "-print_final_stats=0"]
    atheris.Setup([sys.argv[0], *arguments, "-verbosity=0", str(corpus)], one_input, custom_mutator=mutator)
    atheris.Fuzz()


def unguided(session: Session, seed: int) -> None:
    """Fuzz with the same mutations, without coverage: keep and mutate inputs that end in a new error."""
    draw = random.Random(seed)
    pool = list(session.seeds)
    seen = set[str]()
    while time.monotonic() - session.begun < session.seconds:
        case = session.range.mutated(draw.choice(pool), draw)
        outcome = session.attempt(case[:65536])
        if outcome not in seen or draw.random() < 0.01:
            seen.add(outcome)
            pool.append(case)
    session.write()


if __name__ == "__main__":
    folder, seconds, seed = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1
    sys.path.insert(0, str(Path(__file__).parent))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if seconds < 60:  # instrumenting the library takes 40 s
        atheris = None
    with atheris.instrument_imports(include=["jaxckpt"]) if atheris else contextlib.nullcontext():
        import foreign_files
        import hostile
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    (guided if atheris else unguided)(Session(folder, seconds, sys.argv[4:]), seed)
