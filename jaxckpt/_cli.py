"""The command line: thin, over the public functions."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from jaxckpt import _convert as conversion
from jaxckpt._errors import JaxckptError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """The sharded state of JAX training, saved as standard Zarr arrays."""


@app.command()
def integrate(
    old: Annotated[str, typer.Argument(help="Name of the rank files: ./node0/OLD, ./node1/OLD, …")],
    new: Annotated[str, typer.Argument(help="Where the checkpoint goes, a path or URL.")],
    strategy: Annotated[str, typer.Argument(help="The strategy file, protobuf or JSON.")],
    n: Annotated[int, typer.Argument(help="How many ranks there are.", min=1)],
    overwrite: Annotated[bool, typer.Option(help="Replace what is at NEW.")] = False,
) -> None:
    """Merge the files of MindSpore's ranks, as its tutorial's integrate_checkpoint.py does with the same arguments."""
    conversion.integrate(old, new, strategy, n, overwrite=overwrite)


def run() -> None:
    """What the command `jaxckpt` runs."""
    try:
        app()
    except JaxckptError as error:
        sys.exit(f"jaxckpt: {error}")
