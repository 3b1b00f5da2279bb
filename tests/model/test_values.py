"""The table of leaf kinds: every kind comes back from its text or its array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxckpt._model.values import KINDS, NUMBER_KINDS, PYTHON_KINDS, decode_value, encode_value

VALUES = [True, 7, -(1 << 70), 0.1, float("inf"), 1 - 2j, "text", "", b"\0bytes"]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_from_its_text(value: Any) -> None:
    kind, text = encode_value(value) or ("", "")
    assert kind == type(value).__name__ == PYTHON_KINDS[type(value)]
    assert repr(decode_value(kind, text)) == repr(value)


@pytest.mark.parametrize("value", [np.float32(1), np.zeros(2), "\ud800", "x" * 5000, b"x" * 5000, None])
def test_other_values_have_no_text(value: Any) -> None:
    assert encode_value(value) is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [("bool", "yes"), ("int", "x"), ("float", "0xff"), ("complex", "1"), ("bytes", "?"), ("jax", "1"), ("new", "1")],
)
def test_malformed_text_is_refused(kind: str, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the caller adds the leaf's path
        decode_value(kind, text)


def test_values_that_are_stored_as_arrays_come_back_as_their_kind() -> None:
    stored = {"str": np.frombuffer("é".encode(), np.uint8), "bytes": np.frombuffer(b"ab", np.uint8)}
    assert KINDS["str"].from_array(stored["str"]) == "é"
    assert KINDS["bytes"].from_array(stored["bytes"]) == b"ab"
    for kind in NUMBER_KINDS:
        assert type(KINDS[kind].from_array(np.asarray(1))) is KINDS[kind].type
    assert isinstance(KINDS["numpy_scalar"].from_array(np.asarray(1)), np.generic)
    assert [name for name, kind in KINDS.items() if kind.on_devices] == ["jax", "key"]
