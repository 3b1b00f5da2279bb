"""Bytes and rates as text, in binary units."""

from __future__ import annotations

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def show_bytes(size: float) -> str:
    """A size as people read it: "1.5 MiB"."""
    power, rounded = 0, round(size)
    while power + 1 < len(_UNITS) and rounded >= 1024:
        power += 1
        rounded = round(size / 1024**power, 1)
    return f"{rounded:.{min(power, 1)}f} {_UNITS[power]}"


def show_rate(bytes_per_second: float) -> str:
    """A rate in the units of sizes: "1.5 MiB/s"."""
    return f"{show_bytes(bytes_per_second)}/s"


def parse_bytes(text: str) -> int:
    """A positive number of bytes: "65536", "64KiB", "1 MiB". Raises ValueError."""
    match = re.fullmatch(r"(\d{1,15})\s*(B?|[KMGT]iB)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r}: expected bytes, such as 65536, 64KiB or 1MiB")
    return int(match[1]) << 10 * "bkmgt".index(match[2][:1].lower() or "b")
