"""What most families read from GGUF metadata in the same way. Names are those below the architecture's prefix."""

from __future__ import annotations

from typing import Any

import msgspec

from common.models.families.common import SHARED_EXPERTS, all_but_every, check_yarn, extended_context
from common.models.families.harmless import GGUF, GGUF_DEFAULTS
from common.models.fields import Fields
from common.models.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LayerNames,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    RopeType,
    RouterSpec,
    WeightNames,
)
from common.protocol.errors import ConfigError

PLAIN, PAIRED = WeightNames(), WeightNames(paired_rows=True)
"""Of files whose tensors lie and are named as `weights/gguf_tensors.py` says, those of `llama` with paired rows."""
POST_NORMS = WeightNames(
    layer=LayerNames(mixer_norms=("", "post_attention_norm"), mlp_norms=("", "post_ffw_norm")),
)
SANDWICH_NORMS = WeightNames(
    layer=LayerNames(
        mixer_norms=("input_layernorm", "post_attention_norm"), mlp_norms=("post_attention_layernorm", "post_ffw_norm")
    )
)
EXPERTS: WeightNames = msgspec.structs.replace(
    SHARED_EXPERTS, layer=msgspec.structs.replace(SHARED_EXPERTS.layer, choice_bias="exp_probs_b.bias")
)
"""Of models whose experts are chosen by a bias of each, beside one that every token visits."""
Q_BIAS, Q_NORM = "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_norm"
"""Tensors that `fields` has under these names if they are there (`config._TELLING`): no metadata say so."""
SIGMOID = 2
_SOFTMAX = 1
_TYPES: dict[str, RopeType] = {"none": "default", "linear": "linear", "yarn": "yarn"}


def gguf_attention(fields: Fields, *, rope: RopeSpec | None = None, partial: bool = False, **others: Any) -> AttentionSpec:
    """Return the attention of every layer.

    rope: None for what the metadata say. partial: a part of the head may be rotated. others: fields of `AttentionSpec`.

    :raises ConfigError: if a part of the head is rotated and may not be, or more than the head is, or K and V have heads of
        different sizes.
    """
    num_heads = fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", fields.size("embedding_length") // num_heads)
    rotated = fields.size("rope.dimension_count", head_dim)
    if rotated > head_dim:
        raise ConfigError(f"rotary embedding over {rotated} dimensions does not fit a head of {head_dim}")
    if rotated < head_dim and not partial:
        raise ConfigError("rotary embedding over a part of the head is not supported for this family")
    rope = rope or gguf_rope(fields)
    if fields.size("attention.value_length", head_dim) != head_dim:
        raise ConfigError("heads of different sizes for K and V are not supported")
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=gguf_window(fields),
        rope=msgspec.structs.replace(rope, dims=rotated % head_dim),
    )
    return msgspec.structs.replace(spec, **others)


def _kv_heads(fields: Fields, default: int) -> int:
    """:raises ConfigError: if it is another number in another layer."""
    found = fields.get("attention.head_count_kv", default)
    if not isinstance(found, list):
        return fields.size("attention.head_count_kv", default)
    if not found or any(one != found[0] for one in found):
        raise ConfigError(f"attention.head_count_kv in {fields.where} must be the same for all layers")
    return Fields({"attention.head_count_kv": found[0]}, fields.where).size("attention.head_count_kv")


def gguf_window(fields: Fields, default: int = 0) -> int:
    """Return the window of the layers that have one; 0 for none. default: where the file says nothing."""
    return fields.size("attention.sliding_window", default or None) if fields.get("attention.sliding_window", default) else 0


def gguf_windows(fields: Fields, period: int, default: int = 0) -> list[int]:
    """Return each layer's window: of `period` layers all but the last have one, unless the file says another pattern.

    :raises ConfigError: if the pattern is no period and no list with a value for each layer.
    """
    layers, window = fields.size("block_count"), gguf_window(fields, default)
    pattern = fields.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        local = [bool(one) for one in fields.per_layer("attention.sliding_window_pattern", layers, pattern)]
    else:
        period = fields.size("attention.sliding_window_pattern", period)
        local = all_but_every(period, layers)
    return [window if one else 0 for one in local]


def gguf_rope(fields: Fields) -> RopeSpec:
    """Return the rotary positions. Llama 3's scaling is no metadata but a tensor, `rope_freqs.weight`.

    As in llama.cpp, a factor without a type is linear, `attn_factor` multiplies what YaRN has, and files of old say
    `scale_linear`.

    :raises ConfigError: a scaling that is not supported.
    """
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0)) or 1.0
    named = fields.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    kind = _TYPES.get(named) if isinstance(named, str) else None
    if kind is None:
        raise ConfigError(f"rope scaling {named!r} is not supported; supported are {', '.join(_TYPES)}")
    if kind == "yarn":
        fields.only("rope.scaling.yarn_ext_factor", 1.0)
    attention = fields.number("rope.scaling.attn_factor", 1.0)
    if attention != 1.0 and kind != "yarn":
        raise ConfigError(f"rope.scaling.attn_factor {attention} is supported with YaRN only")
    rope = RopeSpec(
        type=kind,
        theta=fields.positive("rope.freq_base", 10_000.0),
        factor=1.0 if kind == "default" else factor,
        original_max_context=fields.size("rope.scaling.original_context_length", fields.size("context_length")),
        beta_fast=fields.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.positive("rope.scaling.yarn_beta_slow", 1.0),
    )
    if factor <= 0:
        raise ConfigError(f"rope.scaling.factor in {fields.where} must be more than 0, not {factor:g}")
    check_yarn(rope, fields.where)
    return msgspec.structs.replace(rope, attention_factor=attention * rope.yarn_attention) if attention != 1.0 else rope


def gguf_mlp(fields: Fields, **others: Any) -> DenseSpec:
    """Return the MLP of every layer. others: fields of `DenseSpec`.

    :raises ConfigError: for a mixture of experts.
    """
    if fields.get("expert_count"):
        raise ConfigError("a mixture of experts is not supported for this family in GGUF files")
    fields.get("expert_used_count")
    return DenseSpec(intermediate_size=fields.size("feed_forward_length"), **others)


def gguf_experts(fields: Fields, router: RouterSpec, *, gating: int = _SOFTMAX, **others: Any) -> ExpertsSpec:
    """Return the experts of every layer. router: what the family says of it. others: fields of `ExpertsSpec`.

    :raises ConfigError: if the file says that the router is another.
    """
    fields.only("expert_gating_func", gating)
    fields.get("feed_forward_length")  # of dense layers, which there are none of
    router = msgspec.structs.replace(
        router,
        num_experts=fields.size("expert_count"),
        top_k=fields.size("expert_used_count"),
        renormalise=fields.flag("expert_weights_norm", router.renormalise),
    )
    middle = fields.size("expert_feed_forward_length", fields.get("feed_forward_length"))
    return ExpertsSpec(router=router, intermediate_size=middle, **others)


def gguf_shared_size(fields: Fields) -> int:
    """Return the size of the expert that every token visits; 0 for none."""
    fields.get("expert_shared_feed_forward_length")  # of some converters only: this times how many there are
    count = int(fields.not_negative("expert_shared_count", 0))
    return count * fields.size("expert_feed_forward_length") if count else 0


def gguf_model(fields: Fields, architecture: str, layers: list[LayerSpec], **others: Any) -> ModelSpec:
    """Return the model of these layers. others: fields of `ModelSpec`.

    :raises ConfigError: if a key with a value is left that nobody read.
    """
    fields.only("attention.causal", True)
    spec = ModelSpec(
        architecture=architecture,
        layers=tuple(layers),
        hidden_size=fields.size("embedding_length"),
        vocab_size=fields.size("vocab_size"),
        max_context=extended_context(fields.size("context_length"), layers),
        rms_eps=fields.not_negative("attention.layer_norm_rms_epsilon", 1e-6),
    )
    fields.check_read(GGUF, GGUF_DEFAULTS)
    return msgspec.structs.replace(spec, **others)
