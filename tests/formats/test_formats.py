"""Formats of other packages, which are found by their entry points."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxckpt
from jaxckpt._sources.compose import compose
from jaxckpt._sources.format_registry import formats

PACKAGE = """
from jaxckpt._sources.compose import compose
from jaxckpt._sources.format_registry import Format

def fail(path, names):
    raise KeyError("boom")

BROKEN = Format("broken", fail, lambda path: None, order=-99)
def read(path):
    with open(path) as file:
        return compose(path, file.read(), "text")

TEXT = Format("text", lambda path, names: path.endswith(".words"), read)
NOT_A_FORMAT = 3
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with a working format and with broken ones."""
    site = tmp_path / "site"
    (site / "stranger-1.dist-info").mkdir(parents=True)
    (site / "stranger.py").write_text(PACKAGE)
    (site / "stranger-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
    points = {"broken": "stranger:BROKEN", "text": "stranger:TEXT", "odd": "stranger:NOT_A_FORMAT", "gone": "nowhere:X"}
    lines = [f"{name} = {value}\n" for name, value in points.items()]
    (site / "stranger-1.dist-info" / "entry_points.txt").write_text("[jaxckpt.formats]\n" + "".join(lines))
    monkeypatch.syspath_prepend(site)
    formats.cache_clear()
    yield
    formats.cache_clear()


def test_another_package_adds_a_format(stranger: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.words").write_text("hello")
    np.savez(tmp_path / "b.npz", w=np.arange(3))
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert jaxckpt.load_numpy(tmp_path / "a.words") == "hello"
        assert jaxckpt.open(tmp_path / "a.words").format == "text"
        assert jaxckpt.load_numpy(tmp_path / "b.npz")["w"].tolist() == [0, 1, 2]
    assert "gone (nowhere:X) cannot be loaded" in caplog.text
    assert "odd (stranger:NOT_A_FORMAT) is not a Format" in caplog.text
    assert "format broken failed" in caplog.text


def test_a_composed_checkpoint_names_its_format(tmp_path: Path) -> None:
    assert compose("here", {"w": np.arange(3)}, "mine").manifest.format == "mine"
