"""Bytes and rates as text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt._pipeline.progress import parse_bytes, show_bytes, show_rate


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (0.4, "0 B"),
        (1023, "1023 B"),
        (1023.7, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),  # not "1024.0 KiB"
        (1536 << 20, "1.5 GiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_sizes(size: float, text: str) -> None:
    assert show_bytes(size) == text
    assert show_rate(size) == f"{text}/s"


@given(st.integers(0, 1 << 49))
def test_a_size_has_at_most_four_digits_before_the_point(size: int) -> None:
    figure, unit = show_bytes(size).split()
    assert float(figure) < 1024
    power = ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    assert abs(float(figure) * 1024**power - size) <= 0.0501 * 1024**power


@given(st.integers(1, 1 << 40), st.sampled_from(["", "B", "KiB", "mib", " GiB", "TiB"]))
def test_sizes_are_read(number: int, unit: str) -> None:
    power = "bkmgt".index(unit.strip()[:1].lower() or "b")
    assert parse_bytes(f"{number}{unit}") == number * 1024**power


@pytest.mark.parametrize("text", ["", "0", "0KiB", "-1", "1.5MiB", "1MB", "MiB", "1Bi", "1e6", "٣", "9" * 5000])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(repr(text))}: expected bytes"):
        parse_bytes(text)
