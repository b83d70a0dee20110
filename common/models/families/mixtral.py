"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope
from common.models.fields import Fields
from common.models.spec import ExpertsSpec, LayerNames, LayerSpec, ModelSpec, RouterSpec, WeightNames

_NAMES = WeightNames(
    layer=LayerNames(router="block_sparse_moe.gate", experts="block_sparse_moe.experts", each_expert=("w1", "w3", "w2"))
)


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    fields.only("hidden_act", "silu")
    window = 0 if fields.get("sliding_window") is None else fields.size("sliding_window")
    router = RouterSpec(
        num_experts=fields.size("num_local_experts", 8), top_k=fields.size("num_experts_per_tok", 2), renormalise=True
    )
    mixer = read_attention(fields, read_rope(fields, theta=1_000_000.0), window=window)
    layer = LayerSpec(mixer=mixer, mlp=ExpertsSpec(router=router, intermediate_size=fields.size("intermediate_size")))
    return read_model(fields, "mixtral", [layer] * fields.size("num_hidden_layers"), names=_NAMES, rms_eps=1e-5)
