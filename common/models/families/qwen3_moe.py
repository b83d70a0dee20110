"""Qwen3-MoE: Qwen3 with a mixture of experts in all layers, or in some of them."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp
from common.models.families.gguf import gguf_attention, gguf_experts, gguf_model
from common.models.families.qwen2 import last_windows
from common.models.families.qwen3 import HEAD_DIM
from common.models.fields import Fields
from common.models.spec import ExpertsSpec, LayerSpec, ModelSpec, RouterSpec


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
    layers = [
        LayerSpec(
            mixer=read_attention(
                fields, rope, head_dim=HEAD_DIM, window=window, qk_norm="head", qkv_bias=bias, output_bias=bias
            ),
            mlp=dense if layer in without or (layer + 1) % step else experts,
        )
        for layer, window in enumerate(last_windows(fields))
    ]
    return read_model(fields, "qwen3_moe", layers)


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    experts = gguf_experts(fields, RouterSpec(num_experts=1, top_k=1, renormalise=True))
    layer = LayerSpec(mixer=gguf_attention(fields, qk_norm="head"), mlp=experts)
    return gguf_model(fields, "qwen3_moe", [layer] * fields.size("block_count"))
