"""Local folders of a run, as `Checkpointer(local=…)` leaves them: the objects of a step spread over several hosts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

RUN = "0123456789abcdef0123456789abcdef"


def spread(step: Path, hosts: Sequence[Path], storage: Path, *, copies: int = 1, run: str = RUN) -> None:
    """Spread the files of a checkpoint over a folder for each process, each file with copies in the next ones."""
    (storage / "_run").mkdir(exist_ok=True)
    (storage / "_run" / f"local-{RUN}").touch()
    for process, host in enumerate(hosts):
        folder = host / f"process-{process}"
        folder.mkdir(parents=True, exist_ok=True)
        note = {"run": run, "storage": str(storage), "folder": str(folder)}
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


def files(step: Path) -> list[Path]:
    """The files that must be somewhere: objects, and what each process alone knew."""
    objects = (file for file in step.glob("data-*/*/c/**/*") if file.is_file())
    return sorted([*objects, *step.glob("data-*/process-*.json")])
