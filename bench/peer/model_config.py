"""One of our model configurations as Hugging Face's config.json: a peer builds the same shape from it."""

from __future__ import annotations

from typing import Any

from common.models.config import ModelConfig, RopeConfig
from common.models.formats.scheme import WeightScheme

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def hugging_face_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": [_ARCHITECTURES[model.architecture]],
        "model_type": model.architecture,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_context,
        "rms_norm_eps": model.rms_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": model.qkv_bias,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **_rope(model.rope),
        **_quantization(model.quantization),
    }


def _quantization(scheme: WeightScheme) -> dict[str, Any]:
    """:raises ValueError: for a format that no shape has."""
    if scheme.name == "plain":
        return {}
    if scheme.name != "awq":
        raise ValueError(f"a peer is not told of {scheme.name} weights")
    awq = {"quant_method": "awq", "bits": scheme.bits, "group_size": scheme.group, "zero_point": True, "version": "gemm"}
    return {"quantization_config": awq}


def _rope(rope: RopeConfig) -> dict[str, Any]:
    if rope.type == "default":
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {
        "rope_type": rope.type,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_context,
    }
    if rope.type == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
