"""Can this draft model be used here? Asked by `up` before any process starts; if it can't, `up` starts without drafts."""

from __future__ import annotations

from typing import Any

import msgspec

from common.cli.fleet import ModelFleet
from common.cli.preflight import Servable, check_model, servable_on_cpu
from common.cli.pull import ensure
from common.engine.load.layout import EngineConfig, limit_context, resolve_engine_precision
from common.models.config import load_config
from common.models.draft_folder import check_fits, check_whole, draft_spec, lacking
from common.models.source import ModelFiles, resolve
from common.protocol.errors import PenstockError
from common.text.vocabulary import check_same_vocabulary


class DraftCheck(msgspec.Struct, frozen=True):
    """`files`: the draft model; None where there is none. `servable`: as each draft worker's engine will have it; None for one
    that takes tensors from its target, on a GPU. `reason`: why drafts are left out; empty where they are not."""

    files: ModelFiles | None = None
    servable: Servable | None = None
    reason: str = ""


def check_draft_model(fleet: ModelFleet, *, fetch: bool = True) -> DraftCheck:
    """Check that the drafts of a fleet are verified, and its draft model, if it has one.

    fetch: download the model first if it is not on this machine.
    """
    settings: Any = fleet.services.get("draft")
    if fleet.config.draft and fleet.config.decode and not getattr(fleet.services.get("decode"), "speculation_tokens", -1):
        return DraftCheck(reason=f"with --speculation-tokens 0 nobody asks --draft {fleet.config.draft}: leave one out")
    asked = getattr(settings, "draft_model", "")
    if not asked:
        return DraftCheck()
    if not fleet.config.draft:
        return DraftCheck(reason=f"--draft-model {asked} needs a draft worker: add --draft 1")
    dummy = settings.load_format == "dummy"
    try:
        name = draft_spec(asked, fleet.config.model, made_up=dummy)
        if fetch:
            ensure(name)
        files = resolve(name, weights=not dummy)
        target = resolve(fleet.config.model, weights=False)
        on_gpu = bool(fleet.gpus) and settings.engine != "simulated"
        engine = EngineConfig.of(settings, on_gpu=on_gpu)
        config = load_config(files)
        engine = msgspec.structs.replace(engine, max_model_len=min(engine.max_model_len, config.max_context))
        if any(lacking(files)):
            check_fits(files, target)
            inventory = check_whole(files)  # each draft worker completes it, which takes torch
            if on_gpu:
                return DraftCheck(files)
            model = limit_context(config, engine)
            precision = resolve_engine_precision(model, engine, "cpu")
            return DraftCheck(files, servable_on_cpu(files, model, precision, inventory, engine))
        check_same_vocabulary(target, files)
        return DraftCheck(files, check_model(name, engine, "cuda" if on_gpu else "cpu", drafts=True))
    except PenstockError as error:
        return DraftCheck(reason=str(error).partition("\n")[0])
