"""Formats of other packages, which are found by their entry points."""

from __future__ import annotations

import logging
import sys
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


# An uninstalled checkout ----------------------------------------------------------------------------------


@pytest.fixture
def uninstalled(tmp_path: Path) -> Iterator[None]:
    """The same packages, without the metadata of jaxckpt's installation, which has the entry points. Name it first:
    `monkeypatch.syspath_prepend` puts back the path that it has found, so this must end after it."""
    before, places = sys.path[:], []
    for number, place in enumerate(map(Path, sys.path)):
        if place.is_dir() and any(place.glob("jaxckpt-*.dist-info")):
            others = tmp_path / f"packages{number}"
            others.mkdir()
            for entry in place.iterdir():
                if not entry.name.startswith("jaxckpt-"):
                    (others / entry.name).symlink_to(entry)
            place = others
        places.append(str(place))
    sys.path[:] = places
    formats.cache_clear()
    yield
    sys.path[:] = before
    formats.cache_clear()


HINT = "is not installed, so it knows no checkpoint formats of other libraries: install it with pip"


def test_an_uninstalled_jaxckpt_says_so_in_its_errors(uninstalled: None, tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", w=np.arange(3))
    orbax_run = tmp_path / "run"
    (orbax_run / "40").mkdir(parents=True)
    (orbax_run / "40" / "_CHECKPOINT_METADATA").write_text("{}")
    for path in (tmp_path / "b.npz", orbax_run, f"{orbax_run}@40", f"{orbax_run}@latest"):
        for function in (jaxckpt.open, jaxckpt.restore, jaxckpt.load_numpy, jaxckpt.verify):
            with pytest.raises(jaxckpt.errors.NotACheckpointError, match=HINT):
                function(path)
    for step in (40, "latest"):
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match=HINT):
            jaxckpt.Run(orbax_run).restore(step)
    with (
        jaxckpt.Checkpointer(tmp_path / "new") as checkpointer,
        pytest.raises(jaxckpt.errors.NotACheckpointError, match=HINT),
    ):
        checkpointer.restore()
    jaxckpt.save(tmp_path / "own", {"w": np.arange(3)})
    for format, destination in ((None, "c.npz"), ("npz", "d")):
        with pytest.raises(jaxckpt.errors.InputError, match=HINT):
            jaxckpt.convert(tmp_path / "own", tmp_path / destination, format=format)


def test_an_uninstalled_jaxckpt_reads_its_own_checkpoints(
    uninstalled: None, tmp_path: Path, stranger: None, caplog: pytest.LogCaptureFixture
) -> None:
    jaxckpt.save(tmp_path / "own", {"w": np.arange(3)})
    assert jaxckpt.load_numpy(tmp_path / "own")["w"].tolist() == [0, 1, 2]
    with pytest.raises(jaxckpt.errors.NotACheckpointError) as missing:
        jaxckpt.load_numpy(tmp_path / "nothing")
    assert HINT not in str(missing.value)  # nothing there could have another format
    (tmp_path / "a.words").write_text("hello")
    assert jaxckpt.load_numpy(tmp_path / "a.words") == "hello"  # another package's format, which is installed
    assert "jaxckpt is not installed with pip" in caplog.text
    (tmp_path / "a.other").write_text("hello")
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match=HINT):
        jaxckpt.load_numpy(tmp_path / "a.other")
