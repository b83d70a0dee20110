"""Qwen3-MoE: Qwen3 with a mixture of experts in all layers, or in some of them."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp, read_windows
from common.models.families.gguf import gguf_attention, gguf_experts, gguf_model
from common.models.families.qwen3 import HEAD_DIM
from common.models.fields import Fields
from common.models.spec import ExpertsSpec, LayerSpec, ModelSpec, RouterSpec
from common.protocol.errors import ConfigError

_WINDOW = 4096


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    fields.only("use_qk_norm", True)
    rope, dense, bias = read_rope(fields), read_silu_mlp(fields), fields.flag("attention_bias")
    # older files say num_experts
    num_experts = fields.size("num_experts", fields.size("num_local_experts", 128))
    router = RouterSpec(
        num_experts=num_experts, top_k=fields.size("num_experts_per_tok", 8), renormalise=fields.flag("norm_topk_prob")
    )
    experts = ExpertsSpec(router=router, intermediate_size=fields.size("moe_intermediate_size", 768))
    step, without = fields.size("decoder_sparse_step", 1), fields.layers("mlp_only_layers", [])
    mixer = read_attention(
        fields, rope, head_dim=HEAD_DIM, window=_window(fields), qk_norm="head", qkv_bias=bias, output_bias=bias
    )
    layers = [
        LayerSpec(mixer=mixer, mlp=dense if layer in without or (layer + 1) % step else experts)
        for layer in range(fields.size("num_hidden_layers"))
    ]
    return read_model(fields, "qwen3_moe", layers)


def _window(fields: Fields) -> int:
    """Return the window of all layers; 0 for none. Unlike for Qwen2 and Qwen3, transformers gives it to every layer.

    :raises ConfigError: if the file says that some layers have none.
    """
    used, first = fields.flag("use_sliding_window"), fields.number("max_window_layers", 0)
    has_one = bool(fields.get("sliding_window", _WINDOW)) and used
    window = fields.size("sliding_window", _WINDOW) if has_one else 0
    windows = read_windows(fields, ["sliding_attention"] * fields.size("num_hidden_layers"), window=window)
    if window and (first > 0 or 0 in windows):
        name = "max_window_layers" if first > 0 else "layer_types"
        raise ConfigError(f"{name} in {fields.where}: a window in some layers alone is not supported for qwen3_moe")
    return window


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    experts = gguf_experts(fields, RouterSpec(num_experts=1, top_k=1, renormalise=True))
    layer = LayerSpec(mixer=gguf_attention(fields, qk_norm="head"), mlp=experts)
    return gguf_model(fields, "qwen3_moe", [layer] * fields.size("block_count"))
