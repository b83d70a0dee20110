"""Gemma 3, text: Gemma 2 with head norms instead of soft caps, and rotary positions of their own in the local layers."""

from __future__ import annotations

import msgspec

from common.models.families.common import all_but_every, read_rope, read_windows
from common.models.families.gemma2 import (
    gemma_attention,
    gemma_layer,
    gemma_model,
    gguf_gemma_layer,
    gguf_gemma_model,
    read_cap,
)
from common.models.families.gguf import gguf_rope, gguf_windows
from common.models.fields import Fields
from common.models.spec import ModelSpec, RopeSpec

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_WINDOW, _PATTERN = 4096, 6
_LARGEST = 62
"""Layers of the 27B model; see `gemma2`."""


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    fields.only("use_bidirectional_attention", False)
    fields.only("attn_logit_softcapping", 0.0)  # transformers, whose results are the reference, reads it and applies none
    everywhere = read_rope(fields, theta=_GLOBAL_THETA, layer_type="full_attention")
    local = _local_rope(fields)
    pattern = fields.size("_sliding_window_pattern", fields.size("sliding_window_pattern", _PATTERN))
    kinds = [
        "sliding_attention" if one else "full_attention" for one in all_but_every(pattern, fields.size("num_hidden_layers"))
    ]
    windows = read_windows(fields, kinds, window=fields.size("sliding_window", _WINDOW))
    layers = [
        gemma_layer(
            fields,
            gemma_attention(fields, local if one else everywhere, window=one, qk_norm="head"),
        )
        for one in windows
    ]
    return gemma_model(fields, "gemma3_text", layers, logit_soft_cap=read_cap(fields, "final_logit_softcapping", 0.0))


def _local_rope(fields: Fields) -> RopeSpec:
    """Files of transformers 4 have a theta for the local layers, which no scaling touches."""
    theta = fields.positive("rope_local_base_freq", _LOCAL_THETA)
    parameters = fields.get("rope_parameters", {})
    if isinstance(parameters, dict) and "sliding_attention" in parameters:
        return read_rope(fields, theta=theta, layer_type="sliding_attention")
    return msgspec.structs.replace(RopeSpec(theta=theta), original_max_context=fields.size("max_position_embeddings", 131_072))


def from_gguf(fields: Fields) -> ModelSpec:
    """The local layers' theta is a key in newer files only; no scaling touches it.

    :raises ConfigError: if a field is missing, wrong or unknown.
    """
    fields = Fields({"rope.freq_base": _GLOBAL_THETA} | dict(fields.data), fields.where)
    everywhere = gguf_rope(fields)
    theta = fields.positive("rope.freq_base_swa", _LOCAL_THETA)
    local = RopeSpec(theta=theta, original_max_context=everywhere.original_max_context)
    layers = [
        gguf_gemma_layer(fields, _LARGEST, window=one, qk_norm="head", rope=local if one else everywhere)
        for one in gguf_windows(fields, _PATTERN, _WINDOW)
    ]
    soft_cap = fields.not_negative("final_logit_softcapping", 0.0)
    return gguf_gemma_model(fields, "gemma3_text", layers, logit_soft_cap=soft_cap)
