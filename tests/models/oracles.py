"""Tiny random models in transformers, as references for the decoder. Float32, eager attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CwmConfig,
    CwmForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from common.models.source import ModelFiles

_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}


def _llama(**changes: Any) -> LlamaForCausalLM:
    config = LlamaConfig(**{**_BASE, "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": _LLAMA3, **changes})
    return LlamaForCausalLM(_eager(config))


def _qwen3(**changes: Any) -> Qwen3ForCausalLM:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen3Config(**{**_BASE, "head_dim": 32, "tie_word_embeddings": False, "rope_parameters": rope, **changes})
    return Qwen3ForCausalLM(_eager(config))


def _of(config: Any, model: Any, **fields: Any) -> Callable[..., Any]:
    return lambda **changes: model(_eager(config(**{**_BASE, **fields, **changes})))


_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
}
_mistral = _of(MistralConfig, MistralForCausalLM, head_dim=16, sliding_window=24)
_qwen2 = _of(Qwen2Config, Qwen2ForCausalLM, tie_word_embeddings=False)
_gemma2 = _of(
    Gemma2Config,
    Gemma2ForCausalLM,
    num_hidden_layers=4,
    head_dim=32,
    sliding_window=24,
    query_pre_attn_scalar=20,
    attn_logit_softcapping=1.5,
    final_logit_softcapping=2.0,
)
_gemma3 = _of(
    Gemma3TextConfig,
    Gemma3ForCausalLM,
    num_hidden_layers=3,
    head_dim=32,
    sliding_window=24,
    query_pre_attn_scalar=20,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
)
_phi3 = _of(Phi3Config, Phi3ForCausalLM, pad_token_id=0)
_olmo2 = _of(Olmo2Config, Olmo2ForCausalLM, pad_token_id=0)
_olmo3 = _of(
    Olmo3Config,
    Olmo3ForCausalLM,
    num_hidden_layers=4,
    sliding_window=24,
    pad_token_id=0,
    rope_parameters={"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
)
_glm4 = _of(Glm4Config, Glm4ForCausalLM, head_dim=32, pad_token_id=0)
_smollm3 = _of(SmolLM3Config, SmolLM3ForCausalLM, num_hidden_layers=4, pad_token_id=0)

_gemma = _of(GemmaConfig, GemmaForCausalLM, head_dim=32)
_ministral = _of(
    MinistralConfig,
    MinistralForCausalLM,
    head_dim=16,
    num_hidden_layers=3,
    sliding_window=24,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
_ministral3 = _of(
    Ministral3Config,
    Ministral3ForCausalLM,
    head_dim=32,
    rope_parameters={
        **_YARN,
        "factor": 32.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    },
)
_granite = _of(
    GraniteConfig,
    GraniteForCausalLM,
    attention_bias=True,
    embedding_multiplier=6.0,
    residual_multiplier=0.3,
    attention_multiplier=0.2,
    logits_scaling=3.0,
)
_granite4 = _of(
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    layer_types=["full_attention"] * 2,
    num_local_experts=0,
    num_experts_per_tok=0,
    shared_intermediate_size=96,
    position_embedding_type="rope",
    mamba_n_heads=8,
    embedding_multiplier=6.0,
    residual_multiplier=0.3,
    attention_multiplier=0.2,
    logits_scaling=3.0,
)
_seed_oss = _of(SeedOssConfig, SeedOssForCausalLM, head_dim=32)
_ernie4_5 = _of(Ernie4_5Config, Ernie4_5ForCausalLM, head_dim=32)
_exaone4 = _of(Exaone4Config, Exaone4ForCausalLM, num_hidden_layers=4, sliding_window=24, sliding_window_pattern=2)
_glm4_moe = _of(
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    num_hidden_layers=3,
    head_dim=32,
    attention_bias=True,
    use_qk_norm=True,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    routed_scaling_factor=1.5,
    pad_token_id=0,
)
_ernie4_5_moe = _of(
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    num_hidden_layers=4,
    moe_num_experts=8,
    moe_k=2,
    moe_intermediate_size=32,
    moe_layer_end_index=2,
)
_cwm = _of(CwmConfig, CwmForCausalLM, head_dim=16, num_hidden_layers=4, sliding_window=24, bos_token_id=0)
_olmoe = _of(OlmoeConfig, OlmoeForCausalLM, intermediate_size=32, num_experts=8, num_experts_per_tok=2, pad_token_id=0)
_mixtral = _of(MixtralConfig, MixtralForCausalLM, num_local_experts=4, num_experts_per_tok=2, sliding_window=24)
_qwen3_moe = _of(
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    head_dim=32,
    num_hidden_layers=3,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    mlp_only_layers=[1],
)
_gpt_oss = _of(
    GptOssConfig,
    GptOssForCausalLM,
    head_dim=32,
    intermediate_size=64,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=24,
    swiglu_limit=1.0,
    rope_parameters={**_YARN, "rope_theta": 1.5e5, "truncate": False},
)
_llama4 = _of(
    Llama4TextConfig,
    Llama4ForCausalLM,
    head_dim=16,
    intermediate_size=32,
    intermediate_size_mlp=128,
    num_hidden_layers=4,
    num_local_experts=8,
    num_experts_per_tok=1,
    interleave_moe_layer_step=2,
    use_qk_norm=False,
    attention_chunk_size=24,
    floor_scale=8,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
)


def _eager(config: Any) -> Any:
    config._attn_implementation = "eager"
    return config


ORACLES: dict[str, Callable[..., Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "llama-untied-biases": lambda: _llama(tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "llama-linear": lambda: _llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama-wide-heads": lambda: _llama(head_dim=40, num_attention_heads=8, num_key_value_heads=2),
    "qwen3-yarn": lambda: _qwen3(rope_parameters=_YARN),
    "qwen3-tied-groups-of-three": lambda: _qwen3(tie_word_embeddings=True, num_attention_heads=6, num_key_value_heads=2),
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen2-windows-in-last-layers": lambda: _qwen2(use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    # every sequence of the tests is longer than 4 tokens, so that transformers takes the long factors as well
    "phi3-longrope": lambda: _phi3(original_max_position_embeddings=4, rope_parameters=_LONGROPE, sliding_window=30),
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "glm4": _glm4,
    "smollm3": _smollm3,
    "smollm3-windows-without-positions": lambda: _smollm3(use_sliding_window=True, sliding_window=24, no_rope_layer_interval=2),
    "gemma": _gemma,
    "ministral": _ministral,
    "ministral3": _ministral3,
    "granite": _granite,
    "granite4": _granite4,
    "granite4-without-positions": lambda: _granite4(position_embedding_type=None),
    "seed-oss": _seed_oss,
    "ernie4.5": _ernie4_5,
    "ernie4.5-moe": _ernie4_5_moe,
    "glm4-moe": _glm4_moe,
    "exaone4": _exaone4,
    "exaone4-without-windows": lambda: _exaone4(sliding_window=None, layer_types=["full_attention"] * 4),
    "cwm": _cwm,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "qwen3-moe": _qwen3_moe,
    "qwen3-moe-weights-as-they-are": lambda: _qwen3_moe(norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[]),
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    "llama4-norms-of-q-and-k": lambda: _llama4(use_qk_norm=True, interleave_moe_layer_step=1, num_experts_per_tok=2),
}
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen2-windows-in-last-layers",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3-longrope",
    "olmo2",
    "olmo3",
    "smollm3",
    "glm4",
    "gemma",
    "ministral",
    "ministral3",
    "granite",
    "granite4",
    "seed-oss",
    "ernie4.5",
    "ernie4.5-moe",
    "glm4-moe",
    "exaone4",
    "cwm",
    "olmoe",
    "mixtral",
    "qwen3-moe",
    "gpt-oss",
    "llama4",
)
"""Those that a test of everything asks about, each kind once or twice."""
GREEDY = {"llama": [140, 118, 118, 118], "qwen3": [3, 212, 7, 81]}
"""What these two generate after `oracle_prompt()`, as recorded when they were made."""


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """changes: of the configuration, for oracles that are not another one changed already."""
    torch.manual_seed(seed)
    model = ORACLES[name](**changes).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():  # transformers starts norms at one and biases at zero, where they test nothing
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in key and key.endswith("weight"):
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
            elif key.endswith(("bias", "sinks")):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model


def oracle_prompt(seed: int = 0, length: int = 53) -> list[int]:
    torch.manual_seed(seed + 2)
    return torch.randint(3, 256, (1, length))[0].tolist()


def save(model: Any, folder: Path, shard_bytes: int | None = None) -> ModelFiles:
    model.save_pretrained(folder, **({"max_shard_size": shard_bytes} if shard_bytes else {}))
    return ModelFiles(name=folder.name, format="safetensors", path=folder)


@torch.no_grad()
def greedy_choices(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """What `model` would have chosen at each place of `output`, given all before: equal to `output` if that is its greedy text.

    One pass over everything instead of a generation, which is much faster and asks the same.
    """
    logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()
