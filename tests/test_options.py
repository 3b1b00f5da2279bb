"""The class that holds all settings."""

from __future__ import annotations

import dataclasses
import pydoc

import pytest

import jaxckpt


def test_help_describes_every_option() -> None:
    text = pydoc.render_doc(jaxckpt.Options)
    for field in dataclasses.fields(jaxckpt.Options):
        assert f" {field.name}: " in text, field.name


def test_a_storage_setting_that_is_not_json_is_an_error() -> None:
    options = jaxckpt.Options(storage={"s3_request_concurrency": {1}})
    with pytest.raises(jaxckpt.errors.InputError, match=r"Options\.storage does not fit .*'set'"):
        jaxckpt.load_numpy("s3://bucket/step", options=options)
