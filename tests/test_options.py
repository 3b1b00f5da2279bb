"""The class that holds all settings."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re

import pytest

import jaxckpt


def test_help_describes_every_option() -> None:
    text = pydoc.render_doc(jaxckpt.Options)
    for field in dataclasses.fields(jaxckpt.Options):
        assert f" {field.name}: " in text, field.name


def test_the_text_of_an_option_is_short() -> None:
    text = (inspect.getdoc(jaxckpt.Options) or "").partition("Attributes:\n")[2].partition("Raises:")[0]
    entries = re.split(r"^    (\w+): ", text, flags=re.MULTILINE)[1:]
    words = {name: len(entry.split()) for name, entry in zip(entries[::2], entries[1::2], strict=True)}
    assert list(words) == [field.name for field in dataclasses.fields(jaxckpt.Options)]
    assert {name: count for name, count in words.items() if count > 50} == {}


def test_a_storage_setting_that_is_not_json_is_an_error() -> None:
    options = jaxckpt.Options(storage={"s3_request_concurrency": {1}})
    with pytest.raises(jaxckpt.errors.InputError, match=r"Options\.storage does not fit .*'set'"):
        jaxckpt.load_numpy("s3://bucket/step", options=options)
