"""The wheel contains the package, its metadata and its licence, and nothing else."""

from __future__ import annotations

import configparser
import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.child

if importlib.util.find_spec("hatchling") is None:
    pytest.skip("hatchling is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_PYTHON = {"jaxckpt/py.typed", "jaxckpt/_inspect/report.html", "jaxckpt/_keywords.toml"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the wheel. The paths of the metadata start with `dist-info/`, without name and version."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.iterdir()
    assert path.name.endswith("-py3-none-any.whl")
    metadata = "-".join(path.name.split("-")[:2]) + ".dist-info/"
    with zipfile.ZipFile(path) as wheel:
        return {name.replace(metadata, "dist-info/"): wheel.read(name) for name in wheel.namelist()}


@pytest.fixture(scope="module")
def metadata(files: dict[str, bytes]) -> Message:
    return Parser().parsestr(files["dist-info/METADATA"].decode())


def test_the_wheel_contains_only_the_package_and_its_metadata(files: dict[str, bytes]) -> None:
    assert {name for name in files if not name.startswith("jaxckpt/")} == {
        "dist-info/METADATA",
        "dist-info/RECORD",
        "dist-info/WHEEL",
        "dist-info/entry_points.txt",
        "dist-info/licenses/LICENSE",
    }
    assert files["dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_contains_every_module_of_the_package(files: dict[str, bytes]) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "jaxckpt").rglob("*.py")}
    assert {name for name in files if name.startswith("jaxckpt/")} == modules | NOT_PYTHON


def test_every_entry_point_is_a_module_of_the_wheel(files: dict[str, bytes]) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(files["dist-info/entry_points.txt"].decode())
    assert dict(entry_points["console_scripts"]) == PROJECT["scripts"]
    assert dict(entry_points["jaxckpt.formats"]) == PROJECT["entry-points"]["jaxckpt.formats"]
    for section in entry_points.sections():
        for target in entry_points[section].values():
            assert target.partition(":")[0].replace(".", "/") + ".py" in files


def test_the_metadata_is_that_of_the_project(metadata: Message) -> None:
    assert metadata["Name"] == "jaxckpt"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Classifier") == PROJECT["classifiers"]
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(needed) == len(PROJECT["dependencies"])
