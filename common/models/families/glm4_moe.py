"""GLM-4.5 and 4.6: a mixture of experts chosen by their scores and a bias of each, beside one that every token visits."""

from __future__ import annotations

import msgspec

from common.models.families.common import SHARED_EXPERTS, read_attention, read_model, read_rope, read_silu_mlp
from common.models.families.gguf import (
    EXPERTS,
    Q_BIAS,
    Q_NORM,
    SIGMOID,
    gguf_attention,
    gguf_experts,
    gguf_model,
    gguf_shared_size,
)
from common.models.fields import Fields
from common.models.spec import DenseSpec, ExpertsSpec, LayerSpec, ModelSpec, RouterSpec, WeightNames
from common.protocol.errors import ConfigError

_GGUF_NAMES: WeightNames = msgspec.structs.replace(
    EXPERTS, layer=msgspec.structs.replace(EXPERTS.layer, mlp_norms=("post_attention_norm", ""))
)
_ROTATED = 0.5
_FIRST = "leading_dense_block_count"


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


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    bias, normed = (bool(fields.numbers(name)) for name in (Q_BIAS, Q_NORM))
    mixer = gguf_attention(fields, partial=True, qkv_bias=bias, qk_norm="head" if normed else "none")
    scale = fields.positive("expert_weights_scale", 1.0)
    router = RouterSpec(num_experts=1, top_k=1, scoring="sigmoid", choice_bias=True, weight_scale=scale)
    experts = gguf_experts(fields, router, gating=SIGMOID, shared_size=gguf_shared_size(fields))
    dense, first = DenseSpec(intermediate_size=fields.size("feed_forward_length")), fields.not_negative(_FIRST, 0)
    drafting = int(fields.not_negative("nextn_predict_layers", 0))
    layers = fields.size("block_count") - drafting
    if layers < 1:
        raise ConfigError(f"nextn_predict_layers in {fields.where} must be fewer than block_count")
    found = [LayerSpec(mixer=mixer, mlp=dense if layer < first else experts) for layer in range(layers)]
    return gguf_model(fields, "glm4_moe", found, names=_GGUF_NAMES, draft_layers=drafting)
