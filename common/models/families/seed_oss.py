"""Seed-OSS: Llama with biases on Q, K and V."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp
from common.models.families.gguf import Q_BIAS, gguf_attention, gguf_mlp, gguf_model
from common.models.fields import Fields
from common.models.spec import LayerNames, LayerSpec, ModelSpec, WeightNames

_GGUF_NAMES = WeightNames(layer=LayerNames(mlp_norms=("post_attention_norm", "")))
_HEAD_DIM = 128


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    fields.get("residual_dropout")  # of training
    mixer = read_attention(
        fields,
        read_rope(fields),
        head_dim=_HEAD_DIM,
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias"),
    )
    layer = LayerSpec(mixer=mixer, mlp=read_silu_mlp(fields, bias=fields.flag("mlp_bias")))
    return read_model(fields, "seed_oss", [layer] * fields.size("num_hidden_layers"))


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    layer = LayerSpec(mixer=gguf_attention(fields, qkv_bias=bool(fields.numbers(Q_BIAS))), mlp=gguf_mlp(fields))
    return gguf_model(fields, "seed_oss", [layer] * fields.size("block_count"), names=_GGUF_NAMES)
