"""Llama 2 and 3, and what is built like them."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp
from common.models.families.gguf import PAIRED, gguf_attention, gguf_experts, gguf_mlp, gguf_model
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec, RouterSpec
from common.protocol.errors import ConfigError


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    if fields.get("use_sliding_window"):
        raise ConfigError("sliding-window attention is not supported for llama")
    bias = fields.flag("attention_bias")
    mixer = read_attention(fields, read_rope(fields), qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(mixer=mixer, mlp=read_silu_mlp(fields, bias=fields.flag("mlp_bias")))
    return read_model(fields, "llama", [layer] * fields.size("num_hidden_layers"))


def from_gguf(fields: Fields) -> ModelSpec:
    """Mistral is a `llama` with a window here, and Mixtral one with experts.

    :raises ConfigError: if a field is missing, wrong or unknown.
    """
    if fields.get("expert_count"):
        mlp = gguf_experts(fields, RouterSpec(num_experts=1, top_k=1, renormalise=True))
        layer = LayerSpec(mixer=gguf_attention(fields), mlp=mlp)
        return gguf_model(fields, "mixtral", [layer] * fields.size("block_count"), names=PAIRED)
    layer = LayerSpec(mixer=gguf_attention(fields), mlp=gguf_mlp(fields))
    return gguf_model(fields, "llama", [layer] * fields.size("block_count"), names=PAIRED)
