"""Writes the golden checkpoints of this version of jaxckpt, once, into a new folder beside this file.

    python tests/data/golden/write.py

They are never written again: tests/test_golden.py proves that every later jaxckpt reads them. The folder is named by
the minor version, such as 0.1. Run this again only for a release that changes what is stored.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
SUPPORT = Path(__file__).resolve().parents[2] / "support"
sys.path[:0] = [str(SUPPORT.parents[1]), str(SUPPORT)]

import golden  # noqa: E402
import jax  # noqa: E402

import jaxckpt  # noqa: E402


def contents(folder: Path) -> dict[str, object]:
    """What the folder holds."""
    described = {name: checkpoint.contains for name, checkpoint in golden.CHECKPOINTS.items()}
    described |= {name: contains for name, (contains, _) in golden.RUNS.items()}
    saved = [
        {
            "name": name,
            "contains": described[name],
            "files": len(names := golden.files(folder / name)),
            "bytes": sum((folder / name / file).stat().st_size for file in names),
        }
        for name in sorted(described)
    ]
    opened = jaxckpt.open(folder / "dtypes")
    return {
        "jaxckpt": jaxckpt.__version__,
        "written": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "libraries": dict(opened.libraries),
        "values": "tests/support/golden.py",
        "checkpoints": saved,
    }


def main() -> None:
    version = ".".join(jaxckpt.__version__.split(".")[:2])
    folder = golden.FOLDER / version
    if folder.exists():
        sys.exit(f"write.py: {folder} exists, and golden checkpoints are never written again")
    assert len(jax.devices()) == 8
    with tempfile.TemporaryDirectory() as parent:
        draft = Path(parent) / version
        for name in golden.CHECKPOINTS:
            golden.save(name, draft / name)
        for name, (_, write) in golden.RUNS.items():
            write(draft / name)
        listed = json.dumps(contents(draft), indent=1, ensure_ascii=False)
        (draft / "CONTENTS.json").write_text(listed + "\n", encoding="utf-8")
        shutil.copytree(draft, folder)  # as git stores it: without hard links
    print(f"{folder}: {len(golden.files(folder))} files; digest for tests/test_golden.py: {golden.digest(folder)}")


if __name__ == "__main__":
    main()
