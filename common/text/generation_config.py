"""What a model's authors recommend for sampling: `generation_config.json` of a folder, `general.sampling.*` of a GGUF header.

A request that does not say gets these values, as in transformers and vLLM. `do_sample: false` is greedy decoding, which is what
transformers does with such a file (vLLM does not look at it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from common.models.json_files import read_object_if_any
from common.models.source import ModelFiles
from common.models.weights.gguf_metadata import read_metadata
from common.protocol.errors import ConfigError

_MAX_TEMPERATURE = 100.0
_MAX_SHOWN = 80


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """None where the model has no opinion. `top_k` 0 is off."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_BOUNDS: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= _MAX_TEMPERATURE,
    "top_k": lambda value: value >= -1,
    "top_p": lambda value: 0 <= value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value <= 10,
}


_NEUTRAL: dict[str, object] = {
    **dict.fromkeys(("num_beams", "typical_p", "guidance_scale"), 1),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "min_length", "min_new_tokens", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), 0
    ),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "stop_strings")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "watermarking_config")),
}
"""What transformers applies besides, by the value that switches it off."""


def not_applied(files: ModelFiles) -> list[str]:
    """Return the settings of generation_config.json that transformers applies to every answer, and nothing here does.

    :raises ConfigError: if the file is damaged.
    """
    if files.format == "gguf":
        return []
    content = read_object_if_any(files.path / "generation_config.json")
    return [name for name, neutral in _NEUTRAL.items() if content.get(name) not in (None, neutral, [], {})]


def load_sampling_defaults(files: ModelFiles, *, metadata: Mapping[str, Any] | None = None) -> SamplingDefaults:
    """:raises ConfigError: if there is a value that can't be sampled with; names the file and the key."""
    if files.format == "gguf":
        header = read_metadata(files.path) if metadata is None else metadata
        given = {name: header.get(key) for name, key in _GGUF_KEYS.items()}
        where = files.path.name
    else:
        content = read_object_if_any(files.path / "generation_config.json")
        given = {name: content.get(name) for name in _BOUNDS}
        if content.get("do_sample") is False:
            given["temperature"] = 0.0
        where = "generation_config.json"
    values: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not _BOUNDS[name](value):
            raise ConfigError(
                f"{where} recommends {name} = {_shown(value)}, which can't be; --generation-config none ignores such values",
                param="generation_config",
            )
        values[name] = max(int(value), 0) if name == "top_k" else float(value)
    return SamplingDefaults(**values)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} …"
