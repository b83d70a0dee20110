"""OLMoE: a mixture of experts in every layer, and norms over the whole of Q and K."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp
from common.models.families.gguf import gguf_attention, gguf_experts, gguf_model
from common.models.fields import Fields
from common.models.spec import ExpertsSpec, LayerSpec, ModelSpec, RouterSpec


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    bias = fields.flag("attention_bias")
    mixer = read_attention(fields, read_rope(fields), qk_norm="projection", qkv_bias=bias, output_bias=bias)
    router = RouterSpec(
        num_experts=fields.size("num_experts", fields.size("num_local_experts", 64)),
        top_k=fields.size("num_experts_per_tok", 8),
        renormalise=fields.flag("norm_topk_prob"),
    )
    experts = ExpertsSpec(router=router, intermediate_size=read_silu_mlp(fields).intermediate_size)
    layer = LayerSpec(mixer=mixer, mlp=experts)
    return read_model(fields, "olmoe", [layer] * fields.size("num_hidden_layers"), rms_eps=1e-5)


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    experts = gguf_experts(fields, RouterSpec(num_experts=1, top_k=1))
    layer = LayerSpec(mixer=gguf_attention(fields, qk_norm="projection"), mlp=experts)
    return gguf_model(fields, "olmoe", [layer] * fields.size("block_count"))
