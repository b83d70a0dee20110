"""Can this head draft here? Asked by `up` before any process starts; if it can't, `up` starts without it. Torch-free."""

from __future__ import annotations

from typing import Any

import msgspec

from common.cli.fleet import ModelFleet
from common.models.config import load_config
from common.models.head_folder import HeadFiles, check_head, find_head
from common.models.source import resolve
from common.protocol.errors import ConfigError, PenstockError


class HeadCheck(msgspec.Struct, frozen=True):
    """`head`: what decode workers will draft with; None where there is none. `reason`: why what was asked for is left out."""

    head: HeadFiles | None = None
    reason: str = ""


def check_fleet_head(fleet: ModelFleet) -> HeadCheck:
    """Check the head of a fleet's decode workers, if it has one."""
    settings: Any = fleet.services.get("decode")
    if settings is None or not fleet.config.decode:
        return HeadCheck()
    return head_of(settings, fleet.config.model, on_gpu=bool(fleet.gpus))


def head_of(settings: Any, model: str, *, on_gpu: bool) -> HeadCheck:
    """settings: a decode worker's. on_gpu: whether it has one; see `find_head`."""
    setting, is_asked_for = settings.head, settings.head not in ("auto", "off")
    made_up = setting == "auto" and settings.load_format == "dummy"
    if setting == "off" or not settings.speculation_tokens or made_up:
        return HeadCheck()
    try:
        files = resolve(model, weights=settings.load_format != "dummy")
        head = find_head(setting, files, on_gpu=on_gpu)
        if head is None:
            return HeadCheck()
        _check_engine(settings)
        check_head(head, load_config(files), files.name)
    except PenstockError as error:
        return HeadCheck(reason=str(error).partition("\n")[0] if is_asked_for or not isinstance(error, _CantRun) else "")
    return HeadCheck(head)


class _CantRun(ConfigError):
    """The engine has no place for a head."""


def _check_engine(settings: Any) -> None:
    """:raises ConfigError: if decode workers with these settings can't run any head."""
    if settings.engine == "simulated":
        raise _CantRun("a head needs a model's hidden states, and a simulated engine has none: use --head off", param="head")
    if settings.zero_retention:
        raise _CantRun("a head keeps hidden states, which zero_retention forbids: use --head off", param="head")


def describe(head: HeadFiles) -> str:
    """Return a sentence about a head, for `doctor`."""
    return f"{head.name}: drafts {head.spec.draft_vocab_size:,} of {head.spec.vocab_size:,} tokens, in {head.path}"
