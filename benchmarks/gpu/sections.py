"""The sections of `make gpu`, in the order of their value. This module imports only the standard library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run that fails by itself."""

    name: str

    function: str
    """"module:function". Takes a `Lab` and yields figures."""

    seconds: float
    """What it takes on an H100, rounded up. Earlier sections leave this time to it."""

    limit_seconds: float
    """It is stopped after this time, or earlier if later sections need the time."""

    is_check: bool = False
    """Whether an error in it fails the run."""

    in_new_worker: bool = False
    """Whether it begins in a new process: one that has allocated no pinned memory and loaded no library of others."""

    argument: str = ""


COMMON_DTYPES = (
    "float32 bfloat16 float16 float64 bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 complex64 complex128"
).split()
RARE_DTYPES = (
    "float8_e4m3fn float8_e5m2 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fnuz float8_e5m2fnuz"
    " float8_e8m0fnu int4 uint4 int2 uint2 float4_e2m1fn"
).split()


def _checks(names: list[str]) -> list[Section]:
    """One section for each dtype: XLA may abort for the rarest."""
    return [Section(f"dtype {name}", "checks:one_dtype", 0.3, 25, is_check=True, argument=name) for name in names]


SECTIONS = (
    Section("facts", "machine:facts", 6, 40),
    *_checks(COMMON_DTYPES),
    # Early, because a device reports only the highest peak of its process.
    Section("device memory", "checks:device_memory", 4, 40, is_check=True),
    Section("donated", "checks:donated", 5, 40, is_check=True),
    Section("configured", "checks:configured", 1, 40, is_check=True),
    Section("replicated", "checks:replicated", 4, 40, is_check=True),
    Section("pinned leaves", "checks:pinned_leaves", 1, 30, is_check=True),
    Section("streamed", "checks:streamed", 11, 60, is_check=True),
    Section("many small", "checks:many_small", 2, 40, is_check=True),
    Section("first saves", "saves:first_saves", 12, 60, in_new_worker=True, argument="jaxckpt"),
    Section("link", "machine:link", 13, 60),
    Section("floor of a save", "machine:floor_of_a_save", 6, 40),
    Section("small leaves alone", "machine:small_leaves_alone", 3, 40),
    Section("large in memory", "other_libraries:large_in_memory", 56, 110),
    Section("small in memory", "other_libraries:small_in_memory", 36, 90),
    Section("interrupts", "interrupts:warm", 30, 60, is_check=True),
    Section("interrupted first calls", "interrupts:cold", 45, 90, is_check=True),
    Section("short steps", "saves:short_steps", 70, 100),
    Section("overlap", "saves:overlap", 4, 50),
    Section("offloaded leaves", "saves:offloaded_leaves", 10, 40),
    Section("flat memory", "saves:flat_memory", 10, 60, is_check=True),
    *_checks(RARE_DTYPES),
    Section("two processes", "children:two_processes", 5, 60),
    Section("tests", "children:tests", 16, 90),
    Section("digest", "machine:digest", 7, 50),
    Section("first saves of orbax v0", "saves:first_saves", 20, 60, in_new_worker=True, argument="orbax v0"),
    Section("first saves of orbax v1", "saves:first_saves", 20, 60, in_new_worker=True, argument="orbax v1"),
    Section("settings", "saves:settings", 60, 120),
    Section("blocks or one by one", "saves:blocks_or_one_by_one", 12, 60),
    Section("model files", "other_libraries:model_files", 36, 80, in_new_worker=True),
    Section("large on disk", "other_libraries:large_on_disk", 34, 110),
)


REPLACE_SECONDS = 12.0
"""What it takes to kill a worker that hangs, and to start another one."""


def limit_seconds(section: Section, later: list[Section], left_seconds: float) -> float:
    """How long a section may take, so that the later ones have their time too; at least what it usually takes."""
    for_later = REPLACE_SECONDS + sum(one.seconds for one in later)
    return min(section.limit_seconds, max(section.seconds, left_seconds - for_later), left_seconds)
