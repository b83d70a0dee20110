"""Qwen3: norms over each head of Q and K."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp
from common.models.families.gguf import gguf_attention, gguf_mlp, gguf_model
from common.models.families.qwen2 import last_windows
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec

HEAD_DIM = 128


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    fields.only("use_qk_norm", True)
    rope, mlp, bias = read_rope(fields), read_silu_mlp(fields), fields.flag("attention_bias")
    layers = [
        LayerSpec(
            mixer=read_attention(fields, rope, head_dim=HEAD_DIM, window=one, qk_norm="head", qkv_bias=bias, output_bias=bias),
            mlp=mlp,
        )
        for one in last_windows(fields)
    ]
    return read_model(fields, "qwen3", layers)


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    layer = LayerSpec(mixer=gguf_attention(fields, qk_norm="head"), mlp=gguf_mlp(fields))
    return gguf_model(fields, "qwen3", [layer] * fields.size("block_count"))
