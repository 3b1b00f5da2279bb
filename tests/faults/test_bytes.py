"""Stored bytes that are not what was saved: flipped, lost, swapped, edited."""

from __future__ import annotations

import collections
from pathlib import Path

import damage
import pytest
from damage import KINDS, Subject
from reliability import Fault

COMPRESSIONS = (None, "zstd")


@pytest.mark.fault(
    7, "a bit flipped in a byte of any kind", "reads raise; verify names leaf and box", quick=14, full=1820
)
def test_a_flipped_bit(fault: Fault, tmp_path: Path) -> None:
    subjects = [Subject(tmp_path / str(compression), compression) for compression in COMPRESSIONS]
    kinds = [collections.defaultdict[str, list[damage.Area]](list) for _ in subjects]
    for subject, found in zip(subjects, kinds, strict=True):
        for area in subject.areas:
            found[area.kind].append(area)
        assert set(found) == set(KINDS)
        assert sum(area.stop - area.start for area in subject.areas) == sum(
            file.stat().st_size for file in subject.path.rglob("*") if file.is_file()
        ), "every byte is of a kind"
    for number in fault.rounds():
        kind = KINDS[number // 2 % len(KINDS)]
        subject = subjects[number % 2]
        area = fault.random.choice(kinds[number % 2][kind])
        place, bit = fault.random.randrange(area.start, area.stop), fault.random.randrange(8)
        content = bytearray((subject.path / area.file).read_bytes())
        content[place] ^= 1 << bit
        with subject.content(area.file, bytes(content)):
            small = kind in ("zarr.json", "manifest", "process state")
            subject.judge(fault, f"{kind}, {area.file} byte {place} bit {bit}", area.file, area.hit(place), quick=small)
