"""Gemma 2: norms around each block, soft caps on scores and logits, a window in every second layer."""

from __future__ import annotations

from typing import Any

from common.models.families.common import read_attention, read_model, read_rope, read_windows
from common.models.families.gguf import SANDWICH_NORMS, gguf_attention, gguf_mlp, gguf_model, gguf_windows
from common.models.fields import Fields
from common.models.spec import AttentionSpec, DenseSpec, LayerNames, LayerSpec, ModelSpec, RopeSpec, WeightNames

NAMES = WeightNames(
    layer=LayerNames(
        mixer_norms=("input_layernorm", "post_attention_layernorm"),
        mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )
)
_HEAD_DIM, _WINDOW = 256, 4096
_LARGEST = 46
"""Layers of the 27B model, which divides scores by the root of hidden_size / heads. GGUF files don't say so."""


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    rope = read_rope(fields)
    soft_cap = read_cap(fields, "attn_logit_softcapping", 50.0)
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(fields.size("num_hidden_layers"))]
    window = fields.size("sliding_window", _WINDOW)
    fields.same_as("sliding_window_size", "sliding_window", window)  # of the first published files
    windows = read_windows(fields, kinds, window=window)
    layers = [gemma_layer(fields, gemma_attention(fields, rope, window=one, soft_cap=soft_cap)) for one in windows]
    return gemma_model(fields, "gemma2", layers, logit_soft_cap=read_cap(fields, "final_logit_softcapping", 30.0))


def read_cap(fields: Fields, name: str, default: float) -> float:
    """Return a soft cap. Null switches it off; only a missing one is the family's default."""
    return 0.0 if name in fields.data and fields.get(name) is None else fields.not_negative(name, default)


def gemma_attention(fields: Fields, rope: RopeSpec, **others: Any) -> AttentionSpec:
    """Return attention whose scale is a field of its own. others: fields of `AttentionSpec`."""
    bias = fields.flag("attention_bias")
    scale = fields.positive("query_pre_attn_scalar", 256) ** -0.5
    return read_attention(fields, rope, head_dim=_HEAD_DIM, scale=scale, qkv_bias=bias, output_bias=bias, **others)


def gemma_layer(fields: Fields, mixer: AttentionSpec) -> LayerSpec:
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.get("hidden_act")  # older files name it, and the layers never read it
    mlp = DenseSpec(intermediate_size=fields.size("intermediate_size"), activation="gelu_tanh")
    return LayerSpec(mixer=mixer, mlp=mlp, norms="sandwich")


def gemma_model(fields: Fields, architecture: str, layers: list[LayerSpec], **others: Any) -> ModelSpec:
    return read_model(
        fields,
        architecture,
        layers,
        tied=True,
        embedding_scale=fields.size("hidden_size") ** 0.5,
        zero_centred_norms=True,
        names=NAMES,
        **others,
    )


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    soft_cap = fields.not_negative("attn_logit_softcapping", 50.0)
    windows = gguf_windows(fields, 2, _WINDOW)
    layers = [gguf_gemma_layer(fields, _LARGEST, window=one, soft_cap=soft_cap) for one in windows]
    return gguf_gemma_model(fields, "gemma2", layers, logit_soft_cap=fields.not_negative("final_logit_softcapping", 30.0))


def gguf_gemma_layer(fields: Fields, largest: int, **others: Any) -> LayerSpec:
    """Return a layer. largest: layers of the family's largest model. others: fields of `AttentionSpec`."""
    mixer = gguf_attention(fields)
    size = mixer.head_dim
    if fields.size("block_count") == largest:
        size = fields.size("embedding_length") // mixer.num_heads
    mixer = gguf_attention(fields, scale=size**-0.5, **others)
    return LayerSpec(mixer=mixer, mlp=gguf_mlp(fields, activation="gelu_tanh"), norms="sandwich")


def gguf_gemma_model(fields: Fields, architecture: str, layers: list[LayerSpec], **others: Any) -> ModelSpec:
    """Norms are plain factors in GGUF files."""
    scale = fields.size("embedding_length") ** 0.5
    return gguf_model(fields, architecture, layers, embedding_scale=scale, names=SANDWICH_NORMS, **others)
