"""`penstock pull`: bring a model's files to this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from common.cli.console import download_bar, err
from common.models.source import DEFAULT_MODEL, ModelFiles, pull, resolve
from common.protocol.errors import UnknownModel

Spec = Annotated[str, typer.Argument(help="The default model's name, a folder, a .gguf file or a Hugging Face id.")]


def command(spec: Spec = DEFAULT_MODEL) -> None:
    """Bring a model's files to this machine (nothing happens if they are here)."""
    files = ensure(spec)
    err.print(f"{files.name} ({files.format}) is in {files.path}")


def ensure(spec: str) -> ModelFiles:
    """The files of `spec`, fetched with a progress bar if they are missing.

    :raises UnknownModel: if they are not here and can't be fetched.
    """
    try:
        return resolve(spec)
    except UnknownModel:
        with download_bar(f"pulling {spec}") as report:
            return pull(spec, progress=report)
