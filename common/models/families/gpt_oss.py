"""gpt-oss: a window in every second layer, sinks, biases everywhere, and experts with a clamped SwiGLU."""

from __future__ import annotations

import msgspec

from common.models.families.common import read_attention, read_model, read_rope, read_windows
from common.models.families.gguf import gguf_attention, gguf_experts, gguf_model, gguf_rope, gguf_windows
from common.models.fields import Fields
from common.models.spec import ExpertsSpec, LayerNames, LayerSpec, ModelSpec, RouterSpec, WeightNames

_NAMES = WeightNames(layer=LayerNames(router="mlp.router", each_expert=(), interleaved_gate_up=True))
_GGUF_NAMES = WeightNames(layer=LayerNames(sinks="attn_sinks.weight", mlp_norms=("post_attention_norm", "")))
_ALPHA, _LIMIT = 1.702, 7.0
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_SOFTMAX_SELECTED = 3
"""`expert_gating_func` of GGUF metadata."""


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    fields.only("hidden_act", "silu")
    for copy in ("experts_per_token", "initial_context_length"):  # what other fields say as well
        fields.get(copy)
    router = RouterSpec(
        num_experts=fields.size("num_local_experts", 128),
        top_k=fields.size("num_experts_per_tok", 4),
        scoring="softmax_selected",
        bias=True,
    )
    experts = ExpertsSpec(
        router=router,
        intermediate_size=fields.size("intermediate_size"),
        activation="clamped_swiglu",
        alpha=fields.number("swiglu_alpha", _ALPHA),
        limit=fields.positive("swiglu_limit", _LIMIT),
        bias=True,
    )
    rope, bias = read_rope(fields, theta=150_000.0, default=_YARN), fields.flag("attention_bias", True)
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(fields.size("num_hidden_layers"))]
    layers = [
        LayerSpec(
            mixer=read_attention(fields, rope, head_dim=64, window=window, sinks=True, qkv_bias=bias, output_bias=bias),
            mlp=experts,
        )
        for window in read_windows(fields, kinds, window=fields.size("sliding_window", 128))
    ]
    return read_model(fields, "gpt_oss", layers, names=_NAMES, rms_eps=1e-5)


def from_gguf(fields: Fields) -> ModelSpec:
    """What all files of the family share is not in the metadata: biases, the clamp, and YaRN that does not round.

    :raises ConfigError: if a field is missing, wrong or unknown.
    """
    router = RouterSpec(num_experts=1, top_k=1, scoring="softmax_selected", bias=True)
    experts = gguf_experts(
        fields, router, gating=_SOFTMAX_SELECTED, activation="clamped_swiglu", alpha=_ALPHA, limit=_LIMIT, bias=True
    )
    rope = msgspec.structs.replace(gguf_rope(fields), truncate=False)
    layers = [
        LayerSpec(
            mixer=gguf_attention(fields, rope=rope, window=window, sinks=True, qkv_bias=True, output_bias=True), mlp=experts
        )
        for window in gguf_windows(fields, 2, 128)
    ]
    return gguf_model(fields, "gpt_oss", layers, names=_GGUF_NAMES)
