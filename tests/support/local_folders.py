"""Local folders in the form that `Checkpointer(local=…)` writes: a step's objects, spread over several hosts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path


def spread(step: Path, hosts: Sequence[Path], run: Path, storage: Path, *, copies: int = 1) -> None:
    """Spread the files of a checkpoint over a folder for each process, each file with copies in the next ones."""
    shutil.copytree(run / "_run", storage / "_run", dirs_exist_ok=True)
    (name,) = (note.name for note in (run / "_run").glob("local-*"))
    for process, host in enumerate(hosts):
        folder = host / f"process-{process}"
        folder.mkdir(parents=True, exist_ok=True)
        note = {"run": name.removeprefix("local-"), "storage": str(storage), "folder": str(folder)}
        (folder / "run.json").write_text(json.dumps(note))
        mine = folder / step.name
        mine.mkdir()
        for number, file in enumerate(files(step)):
            if (process - number) % len(hosts) <= copies:
                place = mine / file.relative_to(step)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)
        for described in step.glob("data-*/*/zarr.json"):
            place = mine / described.relative_to(step)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(described, place)
        shutil.copyfile(step / "manifest.json", mine / "manifest.json")


def take(hosts: Path, run: Path, to: Path, storage: Path) -> list[Path]:
    """Copy the local folders of an earlier run, as if it had saved into `storage`; returns the copies."""
    shutil.copytree(hosts, to)
    shutil.copytree(run / "_run", storage / "_run", dirs_exist_ok=True)
    for note in to.glob("*/process-*/run.json"):
        note.write_text(json.dumps({**json.loads(note.read_text()), "storage": str(storage), "folder": str(note)}))
    return sorted(to.iterdir())


def files(step: Path) -> list[Path]:
    """The files that must exist in at least one folder: objects and process states."""
    objects = (file for file in step.glob("data-*/*/c/**/*") if file.is_file())
    return sorted([*objects, *step.glob("data-*/process-*.json")])
