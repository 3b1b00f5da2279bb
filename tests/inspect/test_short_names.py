"""Names shortened to a width: different names stay different, and only those that would look alike are wider."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxckpt._inspect.short_names import display_width, shorten_end, shorten_names

KEYS = st.sampled_from(
    ["params", "decoder", "layers", "0", "1", "10", "11", "attention_block", "mlp", "scale", "日本語", "é"]
)
PATHS = st.lists(KEYS, min_size=1, max_size=7).map("/".join)
ALIKE = st.builds("{}{}{}".format, st.sampled_from(["", "x" * 30]), st.text("ab#…1", max_size=4), st.just("y" * 30))
NAMES = st.lists(PATHS | ALIKE | st.text(max_size=60), max_size=30)


@given(NAMES, st.integers(1, 70))
@example(["x" * 20, "x" * 9 + "…" + "x" * 10, "x…xx", "x…#1", "…#2"], 4)
def test_different_names_stay_different_and_fit_unless_they_look_alike(names: list[str], width: int) -> None:
    short = shorten_names(names, width)
    assert len(set(zip(names, short, strict=True))) == len(set(names)) == len(set(short))
    assert all(text == name or display_width(text) <= width for name, text in zip(names, short, strict=True))
    assert all(text == name for name, text in zip(names, short, strict=True) if display_width(name) <= width)


@given(st.text(max_size=40), st.integers(1, 50))
def test_a_text_shortened_at_its_end_fits_and_wastes_no_room(text: str, width: int) -> None:
    short = shorten_end(text, width)
    if display_width(text) <= width:
        assert short == text
    else:
        assert short.endswith("…")
        assert text.startswith(short[:-1])
        assert width - 1 <= display_width(short) <= width


@pytest.mark.parametrize(
    ("width", "expected"),
    [(36, "params/decod…layer_norm/scale_weight"), (6, "pa…ght"), (1, "…")],
)
def test_a_name_shows_its_ends(width: int, expected: str) -> None:
    assert shorten_names(["params/decoder/layers/10/layer_norm/scale_weight"], width) == [expected]


def test_names_that_would_look_alike_are_shown_in_full() -> None:
    names = [f"params/decoder/layers/{n}/layer_norm/scale_weight" for n in (0, 1, 10)]
    assert shorten_names([*names, "params/embedding/tables/tokens/weight"], 12) == [*names, "para…/weight"]


def test_long_names_and_many_names_take_little_time() -> None:
    long = f"{'a' * 300_000}{'b' * 300_000}"
    assert shorten_names([long], 30) == [f"{'a' * 10}…{'b' * 19}"]
    many = [f"params/decoder/layer_{n:04d}/{kind}/norm_scale_parameter" for n in range(1000) for kind in "abcde"]
    assert shorten_names(many, 10) == many
