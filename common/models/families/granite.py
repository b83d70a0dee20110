"""Granite: Llama with factors on embeddings, scores, what each block adds, and logits; Granite 4 without Mamba and experts."""

from __future__ import annotations

import msgspec

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp
from common.models.families.gguf import PAIRED, gguf_attention, gguf_mlp, gguf_model
from common.models.fields import Fields
from common.models.spec import DenseSpec, LayerNames, LayerSpec, ModelSpec, RopeSpec, WeightNames
from common.protocol.errors import ConfigError

_NAMES = WeightNames(layer=LayerNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"))
_FACTORS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
_GGUF_FACTORS = ("embedding_scale", "residual_scale", "logit_scale")
_ATTENTION = ("attention", "full_attention")
_LARGEST = 1e6


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    return _from_json(fields, "granite", read_rope(fields), read_silu_mlp(fields, bias=fields.flag("mlp_bias")), WeightNames())


def hybrid(fields: Fields) -> ModelSpec:
    """Of a family with Mamba layers and experts, those models that have neither.

    :raises ConfigError: if one has, or a field is missing, wrong or unknown.
    """
    layers = fields.size("num_hidden_layers")
    for kind in fields.per_layer("layer_types", layers, ["mamba"] * layers):
        if kind not in _ATTENTION:
            raise ConfigError(f"layer type {kind!r} is not supported; of Granite 4, models of attention layers alone are")
    if fields.get("num_local_experts", 8):
        raise ConfigError("a mixture of experts (num_local_experts) is not supported for Granite 4")
    fields.only("normalization_function", "rmsnorm")
    for name in [name for name in fields.data if name.startswith("mamba_")]:
        fields.get(name)  # of layers that there are none of
    for name in ("time_step_limit", "num_experts_per_tok", "intermediate_size", "init_method"):
        fields.get(name)
    kind = fields.get("position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise ConfigError(f"position_embedding_type {kind!r} is not supported; rope and nope are")
    rope = read_rope(fields)
    fields.only("hidden_act", "silu")
    mlp = DenseSpec(intermediate_size=fields.size("shared_intermediate_size", 1024))
    return _from_json(fields, "granitemoehybrid", rope if kind == "rope" else None, mlp, _NAMES)


def _from_json(fields: Fields, architecture: str, rope: RopeSpec | None, mlp: DenseSpec, names: WeightNames) -> ModelSpec:
    bias = fields.flag("attention_bias")
    scale = fields.positive("attention_multiplier", 1.0)
    layer = LayerSpec(mixer=read_attention(fields, rope, scale=scale, qkv_bias=bias, output_bias=bias), mlp=mlp)
    embedding, added, logits = (_factor(fields, name) for name in _FACTORS)
    spec = read_model(fields, architecture, [layer] * fields.size("num_hidden_layers"), names=names)
    return _scaled(spec, embedding, added, logits)


def from_gguf(fields: Fields) -> ModelSpec:
    """Files of Granite 4 without Mamba and experts say that they are this, too, with fields of layers that there are none of.

    :raises ConfigError: if a field is missing, wrong or unknown.
    """
    for name in [name for name in fields.data if name.startswith("ssm.")]:
        fields.get(name)
    fields.get("expert_shared_feed_forward_length")
    mixer = gguf_attention(fields)
    scale, rotates = fields.positive("attention.scale", mixer.scale), fields.flag("rope.scaling.finetuned", True)
    mixer = msgspec.structs.replace(mixer, scale=scale, rope=mixer.rope if rotates else None)
    layer = LayerSpec(mixer=mixer, mlp=gguf_mlp(fields))
    embedding, added, logits = (_factor(fields, name) for name in _GGUF_FACTORS)
    spec = gguf_model(fields, "granite", [layer] * fields.size("block_count"), names=PAIRED)
    return _scaled(spec, embedding, added, logits)


def _factor(fields: Fields, name: str) -> float:
    """:raises ConfigError: if it is none that float32 can bear the square of."""
    factor = fields.positive(name, 1.0)
    if not 1 / _LARGEST <= factor <= _LARGEST:
        raise ConfigError(f"{name} in {fields.where} must be between {1 / _LARGEST:g} and {_LARGEST:g}, not {factor:g}")
    return factor


def _scaled(spec: ModelSpec, embedding: float, added: float, logits: float) -> ModelSpec:
    """embedding: factor of the embedded tokens. added: of what each block adds. logits: what they are divided by.

    The stream is kept divided by `added`, so that blocks add to it what they compute: everything that reads it normalises it,
    x / √(mean x² + ε), which is the same for x / added with ε / added².
    """
    return msgspec.structs.replace(
        spec,
        embedding_scale=embedding / added,
        exact_embedding_scale=True,
        rms_eps=spec.rms_eps / added**2,
        logit_scale=1.0 / logits,
    )
