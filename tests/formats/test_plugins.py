"""A format in a package of its own: installed, found by its entry point, and read like the others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt
from jaxckpt._sources.format_registry import formats

PACKAGE = Path(__file__).parents[1] / "data" / "plugin" / "rawdir.py"


def install(site: Path) -> Path:
    """Install the package into a folder, as pip would."""
    info = site / "rawdir-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(PACKAGE, site)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rawdir\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jaxckpt.formats]\nrawdir = rawdir:FORMAT\n")
    return site


def write(path: Path) -> dict[str, Any]:
    arrays = {
        "params/w": np.arange(96, dtype=np.float32).reshape(8, 12),
        "params/b": np.arange(8, dtype=np.int16),
        "n": np.array(3.5),
    }
    path.mkdir()
    index: dict[str, Any] = {}
    for number, (name, array) in enumerate(arrays.items()):
        (path / f"{number}.bin").write_bytes(array.tobytes())
        index[name] = {"dtype": array.dtype.name, "shape": list(array.shape), "file": f"{number}.bin"}
    (path / "index.json").write_text(json.dumps({"format": "rawdir", "arrays": index}))
    return arrays


@pytest.mark.child
def test_a_strangers_package_is_installed_and_read(tmp_path: Path, run_python: Callable[..., str]) -> None:
    """In a new process, with the package on PYTHONPATH: each function, onto a mesh, and the commands."""
    write(tmp_path / "theirs")
    program = """
import sys, jax, numpy as np, jaxckpt
from jax.sharding import PartitionSpec as P
from click.testing import CliRunner
from jaxckpt._cli.main import main
path, w = sys.argv[1], np.arange(96, dtype=np.float32).reshape(8, 12)
loaded = jaxckpt.load_numpy(path)
assert loaded["params"]["w"].tolist() == w.tolist() and loaded["n"] == 3.5
mesh = jax.make_mesh((2, 4), ("x", "y"))
specs = lambda name, leaf: P("x", "y") if name == "params/w" else P()
jax.config.update("jax_enable_x64", True)
state = jaxckpt.restore(path, mesh=mesh, specs=specs)
assert np.array_equal(state["params"]["w"], w) and state["params"]["w"].sharding.spec == P("x", "y")
checkpoint = jaxckpt.open(path)
assert checkpoint.format == "rawdir"
assert checkpoint["params/w"][2:4, 5:7].tolist() == w[2:4, 5:7].tolist()
assert jaxckpt.verify(path).ok
jaxckpt.convert(path, path + "-ours")
assert jaxckpt.diff(path, path + "-ours").identical
for command in (["show", path], ["ls", path], ["cat", path, "params/b[3]"]):
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
print("all checks passed")
"""
    site = install(tmp_path / "site")
    env = {"PYTHONPATH": f"{site}:{Path(jaxckpt.__file__).parents[1]}"}
    run_python(program, args=[str(tmp_path / "theirs")], env=env, word="all checks passed")


def test_its_errors_and_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "site"))
    formats.cache_clear()
    try:
        write(tmp_path / "theirs")
        assert jaxckpt.open(tmp_path / "theirs").format == "rawdir"
        (tmp_path / "theirs" / "0.bin").write_bytes(b"short")
        with pytest.raises(jaxckpt.errors.DataError, match=r"0\.bin has another size than 'params/w'"):
            jaxckpt.open(tmp_path / "theirs")
        (tmp_path / "theirs" / "0.bin").unlink()
        with pytest.raises(jaxckpt.errors.DataError, match=r"0\.bin is missing"):
            jaxckpt.open(tmp_path / "theirs")
    finally:
        formats.cache_clear()
