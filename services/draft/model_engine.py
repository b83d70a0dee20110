"""From the settings of a draft worker to the engine of its model. Torch is imported only as the engine is opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from common.engine.engine import Engine
from common.engine.load.layout import EngineConfig
from common.engine.load.open import open_engine
from common.engine.load.precision import FP8_SINCE, QuantizationSetting
from common.engine.load.runners import resolve_device
from common.models.config import ModelConfig, load_config
from common.models.draft_folder import draft_spec, lacking
from common.models.source import resolve
from common.protocol.errors import ConfigError, PenstockError, UnknownModel
from common.text.vocabulary import check_same_vocabulary, vocabulary_digest
from services.draft.config import DraftConfig


@dataclass(slots=True)
class DraftEngine:
    """vocabulary: the digest of the model's tokenizer (`Presence.vocabulary`)."""

    engine: Engine
    vocabulary: str


OpenDraftEngine = Callable[[str, Callable[[int, int], None]], DraftEngine]
"""`open_draft_engine(segment_name, on_progress)`; blocks until the weights are loaded."""


def draft_spec_of(config: DraftConfig) -> str:
    """Return the draft model that settings mean. :raises PenstockError: see `draft_spec`."""
    return draft_spec(config.draft_model, config.model, made_up=config.load_format == "dummy")


def with_draft_model(config: DraftConfig) -> DraftConfig:
    """Return settings that name the draft model, so that heartbeats do. Where `auto` finds none they are as they were, and
    `open_draft_engine` says why."""
    try:
        return msgspec.structs.replace(config, draft_model=draft_spec_of(config))
    except PenstockError:
        return config


def engine_settings(config: DraftConfig, spec: str, max_context: int) -> DraftConfig:
    """Return the settings of the draft model's engine, whose context, `max_context` tokens, may be shorter than the limit."""
    return msgspec.structs.replace(
        config, model=spec, served_model_name="", max_model_len=min(config.max_model_len, max_context)
    )


def draft_quantization(config: DraftConfig, model: ModelConfig, capability: tuple[int, int] | None) -> QuantizationSetting:
    """How the weights of a draft model are held. A wrong draft costs a step's time, so they are FP8 where nobody has said
    otherwise and nobody else has quantised them. capability: of the GPU; None: a CPU."""
    if config.draft_quantization != "auto":
        return config.draft_quantization
    if config.quantization != "auto" or model.weight_format != "plain" or config.dtype not in ("auto", "bfloat16"):
        return config.quantization
    return "fp8" if capability is not None and capability >= FP8_SINCE else "auto"


def _capability(config: DraftConfig) -> tuple[int, int] | None:
    """:raises ConfigError: see `resolve_device`."""
    device = resolve_device(EngineConfig.of(config, on_gpu=False))
    if device == "cpu":
        return None
    import torch

    return torch.cuda.get_device_capability(device)


def open_draft_engine(config: DraftConfig, segment_name: str, on_progress: Callable[[int, int], None]) -> DraftEngine:
    """Blocks until the weights are loaded: call it in a thread.

    :raises UnknownModel: the draft model is not on this machine, or the target is not and the draft model takes tensors from
    it.
    :raises ConfigError: it has another vocabulary than the model it drafts for, none is shipped, or the settings don't fit it
    or the machine.
    """
    named = draft_spec_of(config)
    files = resolve(named, weights=config.load_format != "dummy")
    if any(lacking(files)):
        from services.draft.complete_draft import complete  # with torch

        files = complete(files, resolve(config.model))
    model = load_config(files)
    try:
        target = resolve(config.model, weights=False)
    except UnknownModel:
        pass  # decode workers compare: a draft worker may be where the target's files are not
    else:
        check_same_vocabulary(target, files)
    vocabulary = vocabulary_digest(files, model.vocab_size)
    if not vocabulary:
        raise ConfigError(f"the tokenizer of the draft model {files.name} can't be read", param="draft_model")
    spec = named if files.path == resolve(named, weights=False).path else str(files.path)
    settings = engine_settings(config, spec, model.max_context)
    settings = msgspec.structs.replace(settings, quantization=draft_quantization(config, model, _capability(settings)))
    return DraftEngine(open_engine(settings, segment_name, on_progress, drafts=True), vocabulary)
