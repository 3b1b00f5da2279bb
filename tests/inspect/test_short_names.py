"""Names shortened to a width: different names stay different, and the result is never wider unless it must be."""

from __future__ import annotations

import itertools

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
def test_different_names_stay_different_and_fit(names: list[str], width: int) -> None:
    short = shorten_names(names, width)
    assert len(set(zip(names, short, strict=True))) == len(set(names)) == len(set(short))
    widest_mark = len(f"#{len(short)}")
    assert all(display_width(text) <= max(width, widest_mark) for text in short)
    assert all(text == name for name, text in zip(names, short, strict=True) if display_width(name) <= width)
    assert shorten_names(names, width) == short


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
    [
        (
            36,
            [
                "params/deco…0…ayer_norm/scale_weight",
                "params/deco…1…ayer_norm/scale_weight",
                "params/deco…10…yer_norm/scale_weight",
            ],
        ),
        (12, ["par…0…weight", "par…1…weight", "par…10…eight"]),
        (5, ["p…0…t", "p…1…t", "…10…t"]),
        (2, ["#1", "#2", "#3"]),
    ],
)
def test_the_number_of_a_layer_is_shown(width: int, expected: list[str]) -> None:
    names = [f"params/decoder/layers/{n}/layer_norm/scale_weight" for n in (0, 1, 10)]
    assert shorten_names(names, width) == expected
    assert shorten_names(names[:1], width)[0].count("…") == 1


def test_names_that_differ_in_several_places_show_each() -> None:
    pairs = itertools.product((0, 12), ("attention_block", "mlp"))
    names = [f"params/decoder/layers/{n}/{kind}/layer_norm/scale_weight" for n, kind in pairs]
    assert shorten_names(names, 36) == [
        "params/d…0/attention…rm/scale_weight",
        "params/dec…0/mlp…r_norm/scale_weight",
        "params/…12/attention…rm/scale_weight",
        "params/de…12/mlp…r_norm/scale_weight",
    ]


def test_long_names_and_many_names_take_little_time() -> None:
    long = [f"{'a' * 300_000}{n}{'b' * 300_000}" for n in range(3)]
    assert [text.strip("ab…") for text in shorten_names(long, 30)] == ["0", "1", "2"]
    many = [f"params/decoder/layer_{n:04d}/{kind}/norm_scale_parameter" for n in range(1000) for kind in "abcde"]
    assert len(set(shorten_names(many, 10))) == len(many)
