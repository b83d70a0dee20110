"""OLMo 3: OLMo 2 with a sliding window in three of four layers, whose positions no scaling touches."""

from __future__ import annotations

import msgspec

from common.models.families import olmo2
from common.models.families.common import all_but_every, read_attention, read_model, read_rope, read_silu_mlp, read_windows
from common.models.families.gguf import POST_NORMS, gguf_attention, gguf_mlp, gguf_model, gguf_rope, gguf_windows
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec, RopeSpec

_THETA = 500_000.0
_WINDOW, _PATTERN, _CONTEXT = 4096, 4, 2048


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    everywhere = read_rope(fields, theta=_THETA, layer_type="full_attention")
    local = _local_rope(fields, everywhere)
    bias, mlp = fields.flag("attention_bias"), read_silu_mlp(fields)
    kinds = [
        "sliding_attention" if one else "full_attention" for one in all_but_every(_PATTERN, fields.size("num_hidden_layers"))
    ]
    layers = [
        LayerSpec(
            mixer=read_attention(
                fields,
                local if one else everywhere,
                window=one,
                qk_norm="projection",
                qkv_bias=bias,
                output_bias=bias,
            ),
            mlp=mlp,
            norms="post",
        )
        for one in read_windows(fields, kinds, window=fields.size("sliding_window", _WINDOW))
    ]
    return read_model(fields, "olmo3", layers, names=olmo2.NAMES, rms_eps=1e-5)


def _local_rope(fields: Fields, everywhere: RopeSpec) -> RopeSpec:
    """Files of transformers 4 have one theta for all layers, and a scaling for those without a window."""
    parameters = fields.get("rope_parameters", {})
    if isinstance(parameters, dict) and "sliding_attention" in parameters:
        return read_rope(fields, theta=_THETA, layer_type="sliding_attention")
    return RopeSpec(theta=everywhere.theta, original_max_context=fields.size("max_position_embeddings", _CONTEXT))


def from_gguf(fields: Fields) -> ModelSpec:
    """Such files say that they are OLMo 2: their window tells them from it.

    :raises ConfigError: if a field is missing, wrong or unknown.
    """
    if not fields.get("attention.sliding_window"):
        return olmo2.from_gguf(fields)
    everywhere, mlp = gguf_rope(fields), gguf_mlp(fields)
    local = RopeSpec(theta=everywhere.theta, original_max_context=fields.size("context_length"))
    mixer = gguf_attention(fields, rope=everywhere, qk_norm="projection")
    layers = [
        LayerSpec(
            mixer=msgspec.structs.replace(mixer, window=one, rope=local if one else everywhere),
            mlp=mlp,
            norms="post",
        )
        for one in gguf_windows(fields, _PATTERN)
    ]
    return gguf_model(fields, "olmo3", layers, names=POST_NORMS)
