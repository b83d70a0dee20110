"""OLMo 2: norms behind each block instead of before it, and over the whole of Q and K."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp
from common.models.families.gguf import POST_NORMS, gguf_attention, gguf_mlp, gguf_model
from common.models.fields import Fields
from common.models.spec import LayerNames, LayerSpec, ModelSpec, WeightNames

NAMES = WeightNames(
    layer=LayerNames(mixer_norms=("", "post_attention_layernorm"), mlp_norms=("", "post_feedforward_layernorm"))
)


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    bias = fields.flag("attention_bias")
    mixer = read_attention(fields, read_rope(fields), qk_norm="projection", qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(mixer=mixer, mlp=read_silu_mlp(fields), norms="post")
    return read_model(fields, "olmo2", [layer] * fields.size("num_hidden_layers"), names=NAMES, rms_eps=1e-5)


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    fields.only("attention.sliding_window", 0)
    layer = LayerSpec(mixer=gguf_attention(fields, qk_norm="projection"), mlp=gguf_mlp(fields), norms="post")
    return gguf_model(fields, "olmo2", [layer] * fields.size("block_count"), names=POST_NORMS)
