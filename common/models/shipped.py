"""Find the shipped head or draft model that suits a target: one trained for the same model, or for a model of the same name.

The same model is often served from another file: by a path, by a Hugging Face id, in another precision or after fine-tuning. A
wrong proposal costs speed and never changes a token, so a name that begins with the trained model's name is enough, if
vocabulary and hidden size are equal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from common.models.config import load_config
from common.models.source import ModelFiles
from common.protocol.errors import ConfigError


class TrainedFor(NamedTuple):
    """The model that a head or a draft model was trained for; 0: a size that is not said."""

    name: str
    revision: str
    vocab_size: int = 0
    hidden_size: int = 0


def trained_for(said: object) -> TrainedFor:
    """Return what `target` in a config.json says."""
    fields = said if isinstance(said, dict) else {}
    sizes = [value if isinstance(value := fields.get(name), int) else 0 for name in ("vocab_size", "hidden_size")]
    return TrainedFor(str(fields.get("name", "")), str(fields.get("revision", "")), *sizes)


def index_for(target: ModelFiles, shipped: Sequence[TrainedFor]) -> int | None:
    """Return the index of the first entry of `shipped` with the target's name and revision, else of the first whose name and
    sizes match; None if there is none."""
    for index, one in enumerate(shipped):
        if (one.name, one.revision) == (target.name, target.revision):
            return index
    return next((index for index, one in enumerate(shipped) if _is_like(one, target)), None)


def _is_like(known: TrainedFor, target: ModelFiles) -> bool:
    if not known.name or target.format == "dummy" or not f"{_plain(target.name)}-".startswith(f"{_plain(known.name)}-"):
        return False
    try:
        config = load_config(target)
    except ConfigError:  # which whoever loads the model says
        return False
    return (config.vocab_size, config.hidden_size) == (known.vocab_size, known.hidden_size)


def _plain(name: str) -> str:
    """Return a model's name without its owner, in lower case, with hyphens as its only punctuation.

    >>> _plain("HuggingFaceTB/SmolLM2-135M-Instruct"), _plain("SmolLM2-135M-Instruct.Q8_0")
    ('smollm2-135m-instruct', 'smollm2-135m-instruct-q8-0')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.rpartition("/")[2].lower())
