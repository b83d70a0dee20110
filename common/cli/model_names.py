"""Names of models for shell completion, and the options that take one. Nothing here fails or prints: a shell waits for it.

Where a model is to be started: what is on this machine. Where one is asked: what the gateways on the bus serve, heard within a
second, or what is on this machine if there is no bus.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import anyio
import typer

from common.models.naming import DUMMY_PREFIX, model_name
from common.models.shapes import SHAPES
from common.models.source import DEFAULT_MODEL
from common.protocol.errors import PenstockError

CONNECT_S = 0.5
LISTEN_S = 0.4
"""More than one heartbeat of a gateway."""


def local_models(incomplete: str) -> list[str]:
    """What `--model` of `penstock up` can mean without a download, less files: the shell knows those."""
    return [name for name in (DEFAULT_MODEL, *_in_the_hub_cache(), *_dummies(incomplete)) if name.startswith(incomplete)]


def served_models(ctx: typer.Context, incomplete: str) -> list[str]:
    """What `--model` of a request can mean."""
    url = str(ctx.params.get("nats_url") or "")
    names = _on_the_bus(url) if url else []
    return [name for name in names or map(model_name, local_models("")) if name.startswith(incomplete)]


ModelName = Annotated[
    str,
    typer.Option(
        "--model", metavar="NAME", autocompletion=served_models, help="Name of a served model. Default: the only one there is."
    ),
]


def _dummies(incomplete: str) -> list[str]:
    """Shapes with random weights, once somebody begins to type one."""
    asked = incomplete and DUMMY_PREFIX.startswith(incomplete[: len(DUMMY_PREFIX)])
    return [DUMMY_PREFIX + name for name in SHAPES] if asked else []


def _in_the_hub_cache() -> list[str]:
    """Repositories in Hugging Face's cache of which some revision is there."""
    from huggingface_hub import constants

    found: list[str] = []
    with contextlib.suppress(OSError):
        for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
            if any(folder.glob("snapshots/*/config.json")):
                found.append(folder.name.removeprefix("models--").replace("--", "/", 1))
    return found


def _on_the_bus(url: str) -> list[str]:
    """Models that gateways serve; none if there is no bus."""
    from common.cli.client import connected, gateway_models, watch_presence

    async def listen() -> list[str]:
        async with connected(url, "complete", timeout_s=CONNECT_S) as bus:
            return gateway_models(await watch_presence(bus, LISTEN_S), aliases=True)

    try:
        return anyio.run(listen)
    except (PenstockError, OSError):
        return []
