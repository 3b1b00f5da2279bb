"""Exports of a run's steps as folders of safetensors."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass

from jaxckpt._formats.export import StepExport
from jaxckpt._formats.live_export import open_view, require_folder, write_folder
from jaxckpt._formats.safetensors import plan_safetensors
from jaxckpt._job.call import Call
from jaxckpt._keywords import explain_names
from jaxckpt._model.select import Select
from jaxckpt._options import Options, require_bool
from jaxckpt._rules.rename import Renaming


@explain_names
@dataclass(frozen=True, slots=True)
class Export(StepExport):
    """A copy of a step as a folder of safetensors, for `Checkpointer.save(…, export=…)`.

    When the step is published, every process of the job writes some of the files, in the background, from the step. The
    folder appears when it is complete. If the export fails, the step stays, and the error is that of the save.

    Attributes:
        path: The folder: a local path that all processes see.
        select: Only these leaves, by their paths after `rename`; as for `restore`.
        rename: New names, or `Rules`, as for `restore`: `rules.inverse()` for a folder that Hugging Face's libraries
            load.
        overwrite: Replace an existing checkpoint at `path`.

    Raises:
        InputError: A value is invalid, for example a path that is a URL.

    Examples:
        >>> import shutil, jax.numpy as jnp, jaxckpt
        >>> shutil.rmtree("/tmp/jaxckpt-doc/exporting", ignore_errors=True)
        >>> export = jaxckpt.formats.Export("/tmp/jaxckpt-doc/exporting/hf", rename={"params": ""}, select="w")
        >>> with jaxckpt.Checkpointer("/tmp/jaxckpt-doc/exporting/run") as checkpointer:
        ...     saved = checkpointer.save(1, {"params": {"w": jnp.ones(3)}, "step": 1}, export=export)
        >>> jaxckpt.load_numpy("/tmp/jaxckpt-doc/exporting/hf")
        {'w': array([1., 1., 1.], dtype=float32)}
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    select: Select | None = None
    rename: Renaming | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        require_folder(self.path)
        require_bool(self.overwrite, "Export.overwrite")

    def write(self, call: Call, checkpoint: str, options: Options) -> None:
        target = require_folder(self.path)
        source = open_view(call, checkpoint, options, self.rename, self.select)
        write_folder(call, source, source.url, target, plan_safetensors, options, overwrite=self.overwrite)
