"""What most families read from GGUF metadata in the same way. Names are those below the architecture's prefix."""

from __future__ import annotations

from typing import Any

import msgspec

from common.models.families.common import extended_context
from common.models.families.fields import Fields
from common.models.families.harmless import GGUF, GGUF_DEFAULTS
from common.models.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, RopeSpec, RopeType
from common.protocol.errors import ConfigError

_TYPES: dict[str, RopeType] = {"none": "default", "linear": "linear", "yarn": "yarn"}


def gguf_attention(fields: Fields, **others: Any) -> AttentionSpec:
    """Return the attention of every layer. others: fields of `AttentionSpec`.

    :raises ConfigError: if a part of the head is rotated, or K and V have heads of different sizes.
    """
    num_heads = fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", fields.size("embedding_length") // num_heads)
    if fields.size("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError("rotary embedding over a part of the head is not supported for this family")
    if fields.size("attention.value_length", head_dim) != head_dim:
        raise ConfigError("heads of different sizes for K and V are not supported")
    window = fields.size("attention.sliding_window") if fields.get("attention.sliding_window") else 0
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=fields.size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        rope=gguf_rope(fields),
    )
    return msgspec.structs.replace(spec, **others)


def gguf_rope(fields: Fields) -> RopeSpec:
    """Return the rotary positions. Llama 3's scaling is no metadata but a tensor, `rope_freqs.weight`.

    As in llama.cpp, a factor without a type is linear, `attn_factor` multiplies what YaRN has, and files of old say
    `scale_linear`.
    """
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0)) or 1.0
    named = fields.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    kind = _TYPES.get(named)
    if kind is None:
        raise ConfigError(f"rope scaling {named!r} is not supported; supported are {', '.join(_TYPES)}")
    attention = fields.number("rope.scaling.attn_factor", 1.0)
    if attention != 1.0 and kind != "yarn":
        raise ConfigError(f"rope.scaling.attn_factor {attention} is supported with YaRN only")
    rope = RopeSpec(
        type=kind,
        theta=fields.number("rope.freq_base", 10_000.0),
        factor=1.0 if kind == "default" else factor,
        original_max_context=fields.size("rope.scaling.original_context_length", fields.size("context_length")),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )
    return msgspec.structs.replace(rope, attention_factor=attention * rope.yarn_attention) if attention != 1.0 else rope


def gguf_mlp(fields: Fields) -> DenseSpec:
    """:raises ConfigError: for a mixture of experts."""
    if fields.get("expert_count"):
        raise ConfigError("mixture-of-experts GGUF files are not supported")
    fields.get("expert_used_count")
    return DenseSpec(intermediate_size=fields.size("feed_forward_length"))


def gguf_model(fields: Fields, architecture: str, layers: list[LayerSpec], **others: Any) -> ModelSpec:
    """Return the model of these layers. others: fields of `ModelSpec`.

    :raises ConfigError: if a key with a value is left that nobody read.
    """
    spec = ModelSpec(
        architecture=architecture,
        layers=tuple(layers),
        hidden_size=fields.size("embedding_length"),
        vocab_size=fields.size("vocab_size"),
        max_context=extended_context(fields.size("context_length"), layers),
        rms_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-6),
    )
    fields.check_read(GGUF, GGUF_DEFAULTS)
    return msgspec.structs.replace(spec, **others)
