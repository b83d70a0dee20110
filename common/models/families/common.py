"""What most families read from config.json in the same way."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from common.models.families.harmless import JSON, JSON_DEFAULTS
from common.models.fields import MAX_SIZE, Fields
from common.models.spec import (
    AttentionSpec,
    DenseSpec,
    LayerNames,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    RopeType,
    WeightNames,
)
from common.protocol.errors import ConfigError

SCALED: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")
_DEFAULT_CONTEXT = 2048
_ROPE_TYPES: dict[str, RopeType] = {"su": "longrope", **{kind: kind for kind in (*SCALED, "longrope")}}
"""By the name in the files; "su" is what the first Phi-3 models called it."""
_STRETCHING: tuple[RopeType, ...] = ("linear", "llama3", "yarn")
"""Types that mean nothing without a factor."""


SHARED_EXPERTS = WeightNames(
    layer=LayerNames(
        shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
    )
)
"""Names of models whose tokens all visit an expert beside those that are chosen for them."""


def read_rope(
    fields: Fields,
    *,
    theta: float = 10_000.0,
    kinds: Collection[RopeType] = SCALED,
    layer_type: str = "",
    head_dim: int = 0,
    share: float = 1.0,
    default: Mapping[str, Any] = MappingProxyType({}),
    own: Collection[str] = (),
) -> RopeSpec:
    """Return the rotary positions: transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling`.

    layer_type: key of the layers' own parameters within `rope_parameters`. head_dim: given where a part of the head may be
    rotated; share: how much of it, where the files say nothing. default: the family's parameters, where the files have none.
    own: parameters that the family reads itself.

    :raises ConfigError: for a type that is not among `kinds`, a parameter that nobody reads, or a part without a dimension.
    """
    old: dict[str, Any] = fields.get("rope_scaling", {})
    found: Mapping[str, Any] = fields.get("rope_parameters", default if old == {} else old)
    if layer_type and isinstance(found, Mapping) and layer_type in found:
        found = found[layer_type]
    if not isinstance(found, Mapping):
        raise ConfigError(f"the rotary parameters in {fields.where} must be an object, not {found!r}")
    if old and found is not old and layer_type != "sliding_attention":  # which no `rope_scaling` is about
        _check_same(old, found, fields.where)
    get = Fields(found, "rope_parameters")
    named = get.get("rope_type", get.get("type", "default"))
    kind = _ROPE_TYPES.get(named) if isinstance(named, str) else None
    if kind is None or kind not in kinds:
        raise ConfigError(f"rope type {named!r} is not supported; supported are {', '.join(kinds)}")
    share = get.positive("partial_rotary_factor", fields.positive("partial_rotary_factor", share))
    if share > 1.0 or (share != 1.0 and not head_dim):
        raise ConfigError("rotary embedding over a part of the head is not supported for this family")
    dims = int(head_dim * share)
    if head_dim and not dims:
        raise ConfigError(
            f"partial_rotary_factor {share:g} in {fields.where} leaves nothing of {head_dim} dimensions to rotate"
        )
    context = fields.size("max_position_embeddings", _DEFAULT_CONTEXT)
    if kind in _STRETCHING and get.get("factor") is None:
        raise ConfigError(f"rope type {named!r} in {fields.where} has no factor")
    rope = RopeSpec(
        type=kind,
        theta=get.positive("rope_theta", fields.positive("rope_theta", theta)),
        dims=dims if dims < head_dim else 0,
        factor=get.positive("factor", 1.0),
        low_freq_factor=get.positive("low_freq_factor", 1.0),
        high_freq_factor=get.positive("high_freq_factor", 4.0),
        original_max_context=get.size("original_max_position_embeddings", context),
        beta_fast=get.positive("beta_fast", 32.0),
        beta_slow=get.positive("beta_slow", 1.0),
        attention_factor=get.number("attention_factor", 0.0),
        mscale=get.number("mscale", 0.0),
        mscale_all_dim=get.number("mscale_all_dim", 0.0),
        truncate=get.flag("truncate", True),
        short_factors=get.numbers("short_factor"),
        long_factors=get.numbers("long_factor"),
    )
    # transformers, whose results are the reference, ignores YaRN's attn_factor (it reads attention_factor); vLLM applies it
    get.check_read((*own, "attn_factor") if kind == "yarn" else own, {"attn_factor": 1.0})
    check_yarn(rope, fields.where)
    return rope


def _check_same(scaling: object, parameters: Mapping[str, Any], where: str) -> None:
    """Check that `rope_scaling` says nothing else than `rope_parameters`: readers differ in which of them counts.

    :raises ConfigError: naming the first key that differs.
    """
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"rope_scaling in {where} must be an object, not {scaling!r}")
    for name, value in scaling.items():
        other = parameters.get("rope_type", parameters.get("type")) if name in ("rope_type", "type") else parameters.get(name)
        if value is not None and value != other:
            raise ConfigError(
                f"rope_scaling in {where} says {name} {value!r}, and rope_parameters {other!r}: they must be equal"
            )


def check_yarn(rope: RopeSpec, where: str) -> None:
    """:raises ConfigError: if it is YaRN whose formula divides by the logarithm of 1 or by 0."""
    if rope.type != "yarn":
        return
    if rope.theta <= 1.0:
        raise ConfigError(f"rope_theta in {where} must be more than 1 for YaRN, not {rope.theta:g}")
    try:
        attention = rope.yarn_attention
    except ZeroDivisionError:
        attention = 0.0
    if attention <= 0:
        raise ConfigError(f"mscale, mscale_all_dim and attention_factor in {where} give YaRN no scale above 0")


def read_attention(fields: Fields, rope: RopeSpec | None, *, head_dim: int | None = None, **others: Any) -> AttentionSpec:
    """Return attention of the usual fields; head_dim: the family's default. others: fields of `AttentionSpec`."""
    num_heads = fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", head_dim or fields.size("hidden_size") // num_heads)
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
    )
    return msgspec.structs.replace(spec, **others)


def read_silu_mlp(fields: Fields, *, bias: bool = False) -> DenseSpec:
    """:raises ConfigError: if the activation is not silu."""
    fields.only("hidden_act", "silu")
    return DenseSpec(intermediate_size=fields.size("intermediate_size"), bias=bias)


def read_window(fields: Fields, default: int) -> int:
    """Return the window; 0 for none, which null means. default: where the file has no such key; 0 for none."""
    if "sliding_window" in fields.data:
        return 0 if fields.get("sliding_window") is None else fields.size("sliding_window")
    return default


def read_windows(fields: Fields, default: list[str], *, window: int) -> list[int]:
    """Return each layer's window, 0 for full attention. default: layer types where the file lists none.

    :raises ConfigError: for a layer type of another name.
    """
    kinds = fields.per_layer("layer_types", len(default), default)
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer type {kind!r} is not supported; full_attention and sliding_attention are")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def read_rotated(fields: Fields) -> list[bool]:
    """Return which layers have positions: all but every fourth, unless the file says otherwise."""
    num_layers, interval = fields.size("num_hidden_layers"), fields.size("no_rope_layer_interval", 4)
    rotated = fields.per_layer("no_rope_layers", num_layers, all_but_every(interval, num_layers))
    return [bool(one) for one in rotated]  # 1 where there is rope


def all_but_every(interval: int, num_layers: int) -> list[bool]:
    """Return of each layer whether it is another than the last of `interval` layers."""
    return [bool((layer + 1) % interval) for layer in range(num_layers)]


def read_model(
    fields: Fields,
    architecture: str,
    layers: list[LayerSpec],
    *,
    tied: bool = False,
    rms_eps: float = 1e-6,
    **others: Any,
) -> ModelSpec:
    """Return the model of these layers. tied, rms_eps: the family's defaults. others: fields of `ModelSpec`.

    :raises ConfigError: if a key with a value is left that nobody read.
    """
    fields.only("is_causal", True)
    context = fields.size("max_position_embeddings", _DEFAULT_CONTEXT)
    fields.same_as("max_sequence_length", "max_position_embeddings", context)  # Vicuna's
    spec = ModelSpec(
        architecture=architecture,
        layers=tuple(layers),
        hidden_size=fields.size("hidden_size"),
        vocab_size=fields.size("vocab_size"),
        max_context=extended_context(context, layers),
        rms_eps=fields.not_negative("rms_norm_eps", rms_eps),
        tie_embeddings=fields.flag("tie_word_embeddings", tied),
        bos_id=fields.get("bos_token_id"),
    )
    for key in ("quantization_config", "compression_config"):  # `formats.detect` reads them
        fields.get(key)
    fields.check_read(JSON, JSON_DEFAULTS)
    return msgspec.structs.replace(spec, **others)


def extended_context(context: int, layers: list[LayerSpec]) -> int:
    """Return the tokens that the positions reach: YaRN stretches the context that the model was first trained for.

    :raises ConfigError: if they are far too many.
    """
    for layer in layers:
        rope = layer.mixer.rope
        if rope is not None and rope.type == "yarn":
            reached = rope.factor * rope.original_max_context
            if reached > MAX_SIZE:
                raise ConfigError(f"YaRN by a factor of {rope.factor:g} reaches more than {MAX_SIZE:,} tokens")
            context = max(context, math.floor(reached))
    return context
