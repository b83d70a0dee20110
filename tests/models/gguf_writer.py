"""Writes models of transformers as llama.cpp's converter does (`convert_hf_to_gguf.py`). Nothing is shared with the readers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import quantize
from safetensors.numpy import load_file

from common.models.naming import model_name
from common.models.source import ModelFiles

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "smollm3": "smollm3",
    "glm4": "glm4",
    "granite": "granite",
    "granitemoehybrid": "granite",
    "glm4_moe": "glm4moe",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "ministral3": "mistral3",
    "olmoe": "olmoe",
    "gpt_oss": "gpt-oss",
}
_SANDWICH = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_AROUND = {
    "post_self_attn_layernorm.weight": "post_attention_norm.weight",
    "post_mlp_layernorm.weight": "post_ffw_norm.weight",
}
_PARTS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.sinks": "attn_sinks.weight",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "shared_mlp.output_linear": "ffn_down",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PAIRED = ("llama", "smollm3", "granite", "mistral3")
"""Architectures whose Q and K rows are in llama.cpp's order."""
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_ROLES = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def write_model(
    path: Path,
    model: Any,
    *,
    experts: Type = Type.F32,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    tensors_of_a_part: int = 0,
    small_first_part: bool = False,
    file_type: int | None = None,
) -> ModelFiles:
    """`model` in F32, its experts as `experts`. extra: further metadata below the architecture's prefix. tensors: further
    ones. tensors_of_a_part: at most; 0 for one file. small_first_part: of no tensors. file_type: llama.cpp's `ftype`."""
    config = model.config
    model.save_pretrained(path.parent / f"{path.stem}-safetensors")
    own = load_file(path.parent / f"{path.stem}-safetensors" / "model.safetensors")
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_of_a_part, small_first_shard=small_first_part)
    if file_type is not None:
        writer.add_file_type(file_type)
    for key, value in (_metadata(config, architecture) | (extra or {})).items():
        _add(writer, f"{architecture}.{key}", value)
    for name, values in (_tensors(config, architecture, own) | (tensors or {})).items():
        if "_exps.weight" in name:
            writer.add_tensor(name, quantize(values, experts), raw_dtype=experts)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if tensors_of_a_part:
        path = min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return ModelFiles(name=model_name(str(path)), format="gguf", path=path)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if getattr(config, "sliding_window", None):
        found["attention.sliding_window"] = config.sliding_window
    count = next((n for key in _COUNTS if (n := getattr(config, key, None))), None)
    if count and config.model_type != "granitemoehybrid":
        found |= {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    match architecture:
        case "gemma2":
            found |= {"attn_logit_softcapping": config.attn_logit_softcapping}
            found |= {"final_logit_softcapping": config.final_logit_softcapping}
            del found["rope.freq_base"]
        case "granite":
            found |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
            found |= {"residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
            if config.model_type == "granitemoehybrid":
                found["feed_forward_length"] = config.shared_intermediate_size
                found["attention.head_count_kv"] = [config.num_key_value_heads] * config.num_hidden_layers
                found["expert_shared_feed_forward_length"] = config.shared_intermediate_size
                found["rope.scaling.finetuned"] = config.position_embedding_type == "rope"
                found |= {"ssm.conv_kernel": config.mamba_d_conv, "ssm.state_size": config.mamba_d_state}
        case "glm4moe":
            found |= {"expert_feed_forward_length": config.moe_intermediate_size, "expert_gating_func": 2}
            found |= {"expert_shared_count": config.n_shared_experts, "nextn_predict_layers": 0}
            found |= {"leading_dense_block_count": config.first_k_dense_replace}
            found |= {"expert_weights_scale": config.routed_scaling_factor, "expert_weights_norm": config.norm_topk_prob}
            found["rope.dimension_count"] = int(rope.get("partial_rotary_factor", 1.0) * head)
        case "ernie4_5-moe":
            found |= {"expert_used_count": config.moe_k, "expert_feed_forward_length": config.moe_intermediate_size}
            found |= {"expert_shared_count": config.moe_num_shared_experts}
            found |= {"leading_dense_block_count": config.moe_layer_start_index}
            found |= {"interleave_moe_layer_step": config.moe_layer_interval}
        case "exaone4" if config.sliding_window:
            found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
        case "mistral3":
            found |= {"attention.temperature_scale": rope["llama_4_scaling_beta"]}
            found |= {"rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"]}
            found |= {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
        case "qwen3moe":
            found["expert_feed_forward_length"] = config.moe_intermediate_size
        case "gpt-oss":
            found["expert_feed_forward_length"] = config.intermediate_size
        case "phi3" | "glm4":
            found["rope.dimension_count"] = int(rope.get("partial_rotary_factor", 1.0) * head)
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        scale = config.max_position_embeddings / original
        found["rope.scaling.original_context_length"] = original
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    return found


def _tensors(config: Any, architecture: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    tied = config.tie_word_embeddings
    for name, values in tensors.items():
        if name == "lm_head.weight" and tied:
            continue
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if match := _EXPERT.fullmatch(name):
            stacks.setdefault(f"blk.{match[1]}.ffn_{_ROLES[match[3]]}_exps.weight", {})[int(match[2])] = values
            continue
        if name.endswith("shared_mlp.input_linear.weight"):
            layer = name.split(".")[2]
            halves = np.split(values, 2)
            found |= {f"blk.{layer}.ffn_{role}.weight": half for role, half in zip(("gate", "up"), halves, strict=True)}
            continue
        if ".mlp.experts." in name:
            found |= _gpt_oss(name, values)
            continue
        if architecture in _PAIRED and ".q_proj." in name:
            values = _paired(values, config.num_attention_heads)
        if architecture in _PAIRED and ".k_proj." in name:
            values = _paired(values, config.num_key_value_heads)
        found[_name(name, architecture)] = values
    found |= {name: np.stack([each[expert] for expert in range(len(each))]) for name, each in stacks.items()}
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        found["rope_factors_long.weight"] = np.array(rope["long_factor"])
        found["rope_factors_short.weight"] = np.array(rope["short_factor"])
    return found


def _name(name: str, architecture: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, _, layer, part = name.split(".", 3)
    parts = _PARTS
    if architecture in ("gemma2", "gemma3", "olmo2", "exaone4"):
        parts = _PARTS | _SANDWICH
    if architecture == "glm4":
        parts = _PARTS | _AROUND
    if architecture in ("gpt-oss", "glm4moe", "seed_oss"):
        parts = _PARTS | {"post_attention_layernorm.weight": "post_attention_norm.weight"}
    found, new = next((old, new) for old, new in parts.items() if part.startswith(old))
    return f"blk.{layer}.{new}{part.removeprefix(found)}"


def _gpt_oss(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Gate and up, in turns in the published tensor, are two here."""
    layer, last = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
    values = values if last == "bias" else np.ascontiguousarray(values.swapaxes(1, 2))
    if ".down_proj" in name:
        return {f"blk.{layer}.ffn_down_exps.{last}": values}
    return {f"blk.{layer}.ffn_gate_exps.{last}": values[:, ::2], f"blk.{layer}.ffn_up_exps.{last}": values[:, 1::2]}


def _paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of Q and K rows (`LlamaModel.permute` of its converter)."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
