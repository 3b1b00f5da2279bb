"""The class that holds all settings."""

from __future__ import annotations

import dataclasses
import pydoc

import jaxckpt


def test_help_describes_every_option() -> None:
    text = pydoc.render_doc(jaxckpt.Options)
    for field in dataclasses.fields(jaxckpt.Options):
        assert f" {field.name}: " in text, field.name
