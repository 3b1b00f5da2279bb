"""Run Jupyter notebooks, and hold what their cells print against the outputs that are stored in them.

Each notebook runs in a kernel of its own, in an empty working folder, on simulated devices. Times, ids and temporary
folders may differ from what is stored; anything else that does is a failure.

    python docs/run_notebooks.py examples/*.ipynb
    python docs/run_notebooks.py --store examples/*.ipynb   # store the new outputs
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

_TIMEOUT_SECONDS = 120  # for a cell

_VOLATILE = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00))"
    r"|(?P<id>\b[0-9a-f]{32}\b)"
    r"|(?P<folder>/[^\s'\"]*jaxckpt-notebook-[^\s'\"/]+(/[^\s'\"/]+)?)"  # the working folder, or one in it
)


def printed(notebook: Any) -> list[str]:
    """What each code cell shows, as lines of text, without what differs from run to run."""
    lines: list[str] = []
    for number, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
        texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
        shown = _VOLATILE.sub(lambda found: f"<{found.lastgroup}>", "".join(texts))
        lines += [f"Out[{number + 1}]:", *shown.splitlines()]
    return lines


def run(path: Path, store: bool) -> str | None:
    """Run a notebook; get what went wrong."""
    stored = nbformat.read(path, as_version=4)
    executed = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="jaxckpt-notebook-") as folder:
        # The kernel inherits them: it leaves no files behind, and finds no devices but those it simulates.
        os.environ |= {"TMPDIR": folder, "IPYTHONDIR": f"{folder}/ipython", "JAX_PLATFORMS": "cpu"}
        client = nbclient.NotebookClient(
            executed,
            timeout=_TIMEOUT_SECONDS,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
            extra_arguments=["--log-level=ERROR"],  # it warns that it talks in the clear, which is within this machine
        )
        try:
            client.execute()
        except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.CellTimeoutError) as error:
            return str(error)
    if store:
        nbformat.write(executed, path)
        return None
    changed = difflib.unified_diff(printed(stored), printed(executed), "stored", "printed now", lineterm="")
    return "\n".join(changed) or None


def main() -> int:
    parser = argparse.ArgumentParser(description="Run Jupyter notebooks.")
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--store", action="store_true", help="store the outputs instead of comparing them")
    arguments = parser.parse_args()
    failed = 0
    for path in arguments.notebooks:
        print(path, flush=True)
        failure = run(path, arguments.store)
        if failure is not None:
            failed += 1
            print(f"{path}: FAILED; where that is meant, --store\n{failure}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
