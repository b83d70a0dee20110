"""Phi-3 and Phi-4: Q, K and V, and gate and up, are fused in the files; long contexts by LongRoPE."""

from __future__ import annotations

import math

import msgspec

from common.models.families.common import SCALED, read_attention, read_model, read_rope, read_silu_mlp
from common.models.families.gguf import gguf_attention, gguf_mlp, gguf_model, gguf_rope
from common.models.fields import Fields
from common.models.spec import LayerNames, LayerSpec, ModelSpec, RopeSpec, WeightNames
from common.protocol.errors import ConfigError

_NAMES = WeightNames(layer=LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)))
_GGUF_NAMES = WeightNames(layer=LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.up_proj",)))


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    fields.only("attention_bias", False)
    window = 0 if fields.get("sliding_window") is None else fields.size("sliding_window")
    mixer = read_attention(fields, None, window=window)
    mixer = msgspec.structs.replace(mixer, rope=_rope(fields, mixer.head_dim))
    layer = LayerSpec(mixer=mixer, mlp=read_silu_mlp(fields))
    return read_model(fields, "phi3", [layer] * fields.size("num_hidden_layers"), names=_NAMES, rms_eps=1e-5)


def _rope(fields: Fields, head_dim: int) -> RopeSpec:
    rope = read_rope(fields, kinds=(*SCALED, "longrope"), head_dim=head_dim)
    parameters = fields.get("rope_parameters", fields.get("rope_scaling", {}))
    original = fields.get("original_max_position_embeddings")
    if rope.type != "longrope":
        return rope
    if original is not None:
        name, inner = "original_max_position_embeddings", parameters.get("original_max_position_embeddings", original)
        fields.same_as(name, "that of the rotary parameters", inner)
        rope = msgspec.structs.replace(rope, original_max_context=fields.size(name))
    pairs = (rope.dims or head_dim) // 2
    if len(rope.short_factors) != pairs or len(rope.long_factors) != pairs:
        raise ConfigError(f"longrope needs a short and a long factor for each of {pairs} pairs of dimensions")
    _check_factors(rope, fields.where)
    if rope.original_max_context < 2:
        raise ConfigError("longrope needs an original context of more than one token")
    factor = parameters.get("factor") or fields.size("max_position_embeddings") / rope.original_max_context
    attention = math.sqrt(1 + math.log(factor) / math.log(rope.original_max_context)) if factor > 1 else 1.0
    return msgspec.structs.replace(rope, factor=factor, attention_factor=rope.attention_factor or attention)


def _check_factors(rope: RopeSpec, where: str) -> None:
    """:raises ConfigError: if a factor is none, by which frequencies can't be divided."""
    if min((*rope.short_factors, *rope.long_factors), default=1.0) <= 0:
        raise ConfigError(f"longrope's factors in {where} must be more than 0")


def from_gguf(fields: Fields) -> ModelSpec:
    """LongRoPE's factors are tensors, which `fields` has under their names.

    :raises ConfigError: if a field is missing, wrong or unknown.
    """
    dims = fields.size("rope.dimension_count", fields.size("embedding_length") // fields.size("attention.head_count"))
    rope = _gguf_rope(fields)
    if rope.type == "longrope" and {len(rope.short_factors), len(rope.long_factors)} != {dims // 2}:
        raise ConfigError(f"longrope needs a short and a long factor for each of {dims // 2} pairs of dimensions")
    _check_factors(rope, fields.where)
    layer = LayerSpec(mixer=gguf_attention(fields, partial=True, rope=rope), mlp=gguf_mlp(fields))
    return gguf_model(fields, "phi3", [layer] * fields.size("block_count"), names=_GGUF_NAMES)


def _gguf_rope(fields: Fields) -> RopeSpec:
    short, long = fields.numbers("rope_factors_short"), fields.numbers("rope_factors_long")
    if not short and not long:
        return gguf_rope(fields)
    fields.only("rope.scaling.type", "longrope")
    return RopeSpec(
        type="longrope",
        theta=fields.positive("rope.freq_base", 10_000.0),
        factor=fields.size("context_length") / fields.size("rope.scaling.original_context_length"),
        original_max_context=fields.size("rope.scaling.original_context_length"),
        attention_factor=fields.positive("rope.scaling.attn_factor", 1.0),
        short_factors=short,
        long_factors=long,
    )
