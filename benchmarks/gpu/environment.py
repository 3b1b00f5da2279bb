"""The environment of the workers: a checkout that is not installed, and packages from wheels.

The checkout comes first in PYTHONPATH, so that no wheel hides it, then the wheels, then the caller's own
entries. This module imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def prepare(site: Path, wheels: str | None) -> dict[str, str]:
    """The environment for workers. `site` is an empty folder. Raises FileNotFoundError if `wheels` has no wheels."""
    _unpack(wheels, site)
    _describe_checkout(site)
    places = [str(ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONUNBUFFERED": "1",
        # By default, JAX preallocates most of the GPU's memory, which would hide its peaks.
        "XLA_PYTHON_CLIENT_PREALLOCATE": os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
    }


def _unpack(wheels: str | None, site: Path) -> None:
    """A wheel is a zip file. pip may be missing, or refuse to install without a network."""
    if not wheels:
        return
    found = sorted(Path(wheels).glob("*.whl"))
    if not found:
        what = "has no wheels (*.whl)" if Path(wheels).is_dir() else "is not a folder"
        raise FileNotFoundError(f"GPU_WHEELS={wheels} {what}: name a folder with the wheels of the missing packages")
    for wheel in found:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)


def _describe_checkout(site: Path) -> None:
    """Write the entry points of the checkout, by which jaxckpt finds the formats of other libraries."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / f"{project['name']}-0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def facts(wheels: str | None, is_dry: bool) -> dict[str, str]:
    """When and what: the figures of one run are those of one day, card and commit."""
    commit = ""
    with contextlib.suppress(OSError):  # no git
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    noted = Path(wheels or "", "commit")  # for a machine without git, whoever carries the wheels may carry this too
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "commit": commit or (noted.read_text().strip() if wheels and noted.exists() else "unknown"),
        "sizes": "small: the figures mean nothing" if is_dry else "full",
    }
