"""What a model's specification asks for, and what the CPU's 8-bit engine has of it. Torch-free.

The torch engine computes every specification, on a CPU and on a GPU. `INT8_HAS` is what to extend when kernels learn more.
"""

from __future__ import annotations

from typing import Literal

from common.models.spec import DenseSpec, LayerSpec, ModelSpec

Feature = Literal[
    "attention windows",
    "attention chunks",
    "attention sinks",
    "soft caps on attention scores",
    "a soft cap on logits",
    "scaled embeddings",
    "scaled logits",
    "attention scores of another scale than 1/√head_dim",
    "layers without positions",
    "rotation of a part of each head",
    "interleaved rotary positions",
    "rotary positions that differ between layers",
    "query temperature",
    "norms behind blocks",
    "norms over the whole of Q and K",
    "L2 norms of Q and K",
    "gelu",
    "experts",
    "a head of a part of the vocabulary",
]

INT8_HAS: frozenset[Feature] = frozenset({"layers without positions", "a head of a part of the vocabulary"})
"""What the CPU's 8-bit engine computes beyond Llama, Qwen2 and Qwen3."""


def int8_lacks(model: ModelSpec) -> list[Feature]:
    """Return what the CPU's 8-bit engine can't compute of this model."""
    return [feature for feature in features(model) if feature not in INT8_HAS]


def features(model: ModelSpec) -> list[Feature]:
    """Return what this model needs beyond Llama, Qwen2 and Qwen3, each once, in a fixed order."""
    found: dict[Feature, bool] = {
        "a soft cap on logits": model.logit_soft_cap > 0,
        "scaled embeddings": model.embedding_scale != 1.0,
        "scaled logits": model.logit_scale != 1.0,
        "rotary positions that differ between layers": len(model.ropes) > 1,
        "a head of a part of the vocabulary": model.draft_vocab_size > 0,
    }
    for layer in dict.fromkeys(model.layers):
        for feature, needed in _of_layer(layer).items():
            found[feature] = found.get(feature, False) or needed
    return sorted(feature for feature, needed in found.items() if needed)


def _of_layer(layer: LayerSpec) -> dict[Feature, bool]:
    mixer, rope = layer.mixer, layer.mixer.rope
    return {
        "attention windows": mixer.window > 0,
        "attention chunks": mixer.chunk > 0,
        "attention sinks": mixer.sinks,
        "soft caps on attention scores": mixer.soft_cap > 0,
        "attention scores of another scale than 1/√head_dim": mixer.scale != mixer.head_dim**-0.5,
        "layers without positions": rope is None,
        "rotation of a part of each head": rope is not None and rope.dims > 0,
        "interleaved rotary positions": rope is not None and rope.interleaved,
        "query temperature": mixer.temperature is not None,
        "norms behind blocks": layer.norms != "pre",
        "norms over the whole of Q and K": mixer.qk_norm == "projection",
        "L2 norms of Q and K": mixer.qk_norm == "l2",
        "gelu": layer.mlp.activation == "gelu_tanh",
        "experts": not isinstance(layer.mlp, DenseSpec),
    }
