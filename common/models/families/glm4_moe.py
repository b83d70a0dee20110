"""GLM-4.5 and 4.6: a mixture of experts chosen by their scores and a bias of each, beside one that every token visits."""

from __future__ import annotations

import msgspec

from common.models.families.common import SHARED_EXPERTS, read_attention, read_model, read_rope, read_silu_mlp
from common.models.fields import Fields
from common.models.spec import ExpertsSpec, LayerSpec, ModelSpec, RouterSpec

_ROTATED = 0.5


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    for name in ("n_group", "topk_group"):
        fields.only(name, 1)
    drafting = int(fields.not_negative("num_nextn_predict_layers", fields.not_negative("num_mtp_layers", 1)))
    bias, normed = fields.flag("attention_bias"), fields.flag("use_qk_norm")
    mixer = read_attention(fields, None, qkv_bias=bias, qk_norm="head" if normed else "none")
    rope = read_rope(fields, head_dim=mixer.head_dim, share=_ROTATED)
    mixer, dense = msgspec.structs.replace(mixer, rope=rope), read_silu_mlp(fields)
    router = RouterSpec(
        num_experts=fields.size("n_routed_experts", fields.size("num_local_experts", 128)),
        top_k=fields.size("num_experts_per_tok", 8),
        scoring="sigmoid",
        renormalise=fields.flag("norm_topk_prob", True),
        choice_bias=True,
        weight_scale=fields.positive("routed_scaling_factor", 1.0),
    )
    middle = fields.size("moe_intermediate_size", 1408)
    shared = int(fields.not_negative("n_shared_experts", 1)) * middle
    experts = ExpertsSpec(router=router, intermediate_size=middle, shared_size=shared)
    first = fields.not_negative("first_k_dense_replace", 1)
    layers = [
        LayerSpec(mixer=mixer, mlp=dense if layer < first else experts) for layer in range(fields.size("num_hidden_layers"))
    ]
    return read_model(fields, "glm4_moe", layers, names=SHARED_EXPERTS, rms_eps=1e-5, draft_layers=drafting)
