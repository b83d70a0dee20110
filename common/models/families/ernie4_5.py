"""ERNIE 4.5: Llama whose neighbouring dimensions turn against each other, dense or with experts that are chosen by their scores
and a bias of each, beside one that every token visits."""

from __future__ import annotations

import msgspec

from common.models.families.common import SHARED_EXPERTS, read_attention, read_model, read_rope, read_silu_mlp
from common.models.families.gguf import EXPERTS, gguf_attention, gguf_experts, gguf_mlp, gguf_model, gguf_shared_size
from common.models.fields import Fields
from common.models.spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, ModelSpec, RouterSpec, WeightNames

_HEAD_DIM, _THETA = 128, 500_000.0
_NAMES: WeightNames = msgspec.structs.replace(
    SHARED_EXPERTS,
    layer=msgspec.structs.replace(
        SHARED_EXPERTS.layer, choice_bias="mlp.moe_statics.e_score_correction_bias", choice_bias_in_rows=True
    ),
)


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    bias = fields.flag("use_bias")
    layer = LayerSpec(mixer=_mixer(fields, bias, head_dim=_HEAD_DIM), mlp=read_silu_mlp(fields, bias=bias))
    return read_model(fields, "ernie4_5", [layer] * fields.size("num_hidden_layers"), tied=True, rms_eps=1e-5)


def with_experts(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    fields.only("use_bias", False)
    fields.get("moe_norm_min")  # the least that weights are divided by, which no sum of softmaxes comes near
    fields.only("moe_use_aux_free", True)
    for name in ("moe_capacity", "moe_gate"):
        fields.get(name)  # of training
    layers, mixer, dense = fields.size("num_hidden_layers"), _mixer(fields, False), read_silu_mlp(fields)
    router = RouterSpec(
        num_experts=fields.size("moe_num_experts", 64), top_k=fields.size("moe_k", 6), renormalise=True, choice_bias=True
    )
    middle = fields.size("moe_intermediate_size", 1536)
    shared = int(fields.not_negative("moe_num_shared_experts", 2)) * middle
    experts = ExpertsSpec(router=router, intermediate_size=middle, shared_size=shared)
    first, last = int(fields.not_negative("moe_layer_start_index", 1)), int(fields.number("moe_layer_end_index", -1))
    last, step = layers - 1 if last == -1 else last, fields.size("moe_layer_interval", 1)
    sparse = [first <= layer <= last and not (layer + 1) % step for layer in range(layers)]
    found = [LayerSpec(mixer=mixer, mlp=experts if one else dense) for one in sparse]
    return read_model(fields, "ernie4_5_moe", found, tied=True, names=_NAMES, rms_eps=1e-5)


def _mixer(fields: Fields, bias: bool, *, head_dim: int | None = None) -> AttentionSpec:
    rope = msgspec.structs.replace(read_rope(fields, theta=_THETA), interleaved=True)
    return read_attention(fields, rope, head_dim=head_dim, qkv_bias=bias, output_bias=bias)


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    layer = LayerSpec(mixer=_gguf_mixer(fields), mlp=gguf_mlp(fields))
    return gguf_model(fields, "ernie4_5", [layer] * fields.size("block_count"))


def experts_from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    router = RouterSpec(num_experts=1, top_k=1, renormalise=True, choice_bias=True)
    experts = gguf_experts(fields, router, shared_size=gguf_shared_size(fields))
    mixer, dense = _gguf_mixer(fields), DenseSpec(intermediate_size=fields.size("feed_forward_length"))
    first, step = fields.not_negative("leading_dense_block_count", 0), fields.size("interleave_moe_layer_step", 1)
    sparse = [first <= layer and not (layer + 1) % step for layer in range(fields.size("block_count"))]
    layers = [LayerSpec(mixer=mixer, mlp=experts if one else dense) for one in sparse]
    return gguf_model(fields, "ernie4_5_moe", layers, names=EXPERTS)


def _gguf_mixer(fields: Fields) -> AttentionSpec:
    mixer = gguf_attention(fields)
    assert mixer.rope is not None
    return msgspec.structs.replace(mixer, rope=msgspec.structs.replace(mixer.rope, interleaved=True))
