"""Llama 4, text: attention within chunks, and in every fourth layer over everything without positions; one expert a token."""

from __future__ import annotations

import msgspec

from common.models.families.common import read_attention, read_model, read_rope, read_rotated, read_silu_mlp
from common.models.fields import Fields
from common.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerNames,
    LayerSpec,
    ModelSpec,
    QueryTemperature,
    RouterSpec,
    WeightNames,
)
from common.protocol.errors import ConfigError

_NAMES = WeightNames(
    layer=LayerNames(
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        experts="feed_forward.experts",
        each_expert=(),
        shared_gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
        shared_down="feed_forward.shared_expert.down_proj",
    )
)


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    num_layers = fields.size("num_hidden_layers")
    expert = read_silu_mlp(fields)
    dense = msgspec.structs.replace(expert, intermediate_size=fields.size("intermediate_size_mlp", 16_384))
    router = RouterSpec(
        num_experts=fields.size("num_local_experts", 16),
        top_k=fields.size("num_experts_per_tok", 1),
        scoring="sigmoid",
        weigh_inputs=True,
    )
    experts = ExpertsSpec(router=router, intermediate_size=expert.intermediate_size, shared_size=expert.intermediate_size)
    step = fields.size("interleave_moe_layer_step", 1)
    sparse = fields.layers("moe_layers", list(range(step - 1, num_layers, step)))
    layers = [
        LayerSpec(mixer=mixer, mlp=experts if layer in sparse else dense)
        for layer, mixer in enumerate(_mixers(fields, num_layers))
    ]
    return read_model(fields, "llama4_text", layers, names=_NAMES, rms_eps=1e-5)


def _mixers(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    bias, rope = fields.flag("attention_bias"), read_rope(fields, theta=500_000.0)
    rope = msgspec.structs.replace(rope, interleaved=True)
    has_rope = read_rotated(fields)
    kinds = fields.per_layer("layer_types", num_layers, ["chunked_attention" if one else "full_attention" for one in has_rope])
    chunk = fields.size("attention_chunk_size", 8192)
    chunks = {"chunked_attention": chunk, "full_attention": 0}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in chunks:
            raise ConfigError(f"layer type {kind!r} is not supported; {' and '.join(chunks)} are")
    normed = fields.flag("use_qk_norm", True)
    temperature = QueryTemperature(scale=fields.number("attn_scale", 0.1), floor=fields.positive("floor_scale", 8192), shift=1)
    tuned = fields.flag("attn_temperature_tuning", True)
    return [
        read_attention(
            fields,
            rope if rotated else None,
            head_dim=128,
            chunk=chunks[kind],
            qk_norm="l2" if normed and rotated else "none",
            temperature=temperature if tuned and not rotated else None,
            qkv_bias=bias,
            output_bias=bias,
        )
        for rotated, kind in zip(has_rope, kinds, strict=True)
    ]
