"""Seed-OSS: Llama with biases on Q, K and V."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec

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
