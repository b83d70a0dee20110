"""`penstock pull`: bring a model's files to this machine, and say whether they can be served here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.cli.console import download_bar, err
from common.cli.gpus import visible_gpus
from common.cli.model_names import local_models
from common.models.config import check_config_file
from common.models.json_files import read_object_if_any
from common.models.source import DEFAULT_MODEL, ModelFiles, pull, resolve
from common.protocol.errors import UnknownModel

Spec = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        autocompletion=local_models,
        help="A model: the default one's name, a folder, a .gguf file or a Hugging Face id (owner/name, owner/name:Q4_K_M).",
    ),
]


def command(spec: Spec = DEFAULT_MODEL) -> None:
    """Bring a model's files to this machine, and check that they can be served."""
    from common.cli.head_check import describe  # slow to import, as the next ones
    from common.cli.preflight import check_model
    from common.models.head_folder import open_head

    files = ensure(spec)
    err.print(f"{files.name} ({files.format}) is in {files.path}", markup=False)
    if _is_head(files.path):
        err.print(f"it is a head that drafts for another model: {describe(open_head(files.path, files.name))}", markup=False)
        err.print(f"use it with --head {spec}", markup=False)
        return
    servable = check_model(spec, device="cuda" if visible_gpus("auto") else "cpu")
    for warning in servable.warnings:
        err.print(f"[yellow]warning[/] {warning}")
    err.print(f"it can be served: {servable}", markup=False)


def ensure(spec: str) -> ModelFiles:
    """The files of `spec`, fetched with a progress bar if they are missing. A repository's configuration comes first: weights
    of a model that is not supported are not fetched.

    :raises UnknownModel: if they are not here and can't be fetched. :raises ConfigError: if it is no supported model.
    """
    try:
        return resolve(spec)
    except UnknownModel:
        with download_bar(f"pulling {spec}") as report:
            return pull(spec, progress=report, check=_check_folder)


def _check_folder(folder: Path) -> None:
    if _is_head(folder):
        from common.models.head_folder import open_head

        open_head(folder)
    else:
        check_config_file(folder / "config.json")


def _is_head(path: Path) -> bool:
    from common.models.head_config import is_head

    return path.is_dir() and is_head(read_object_if_any(path / "config.json"))
