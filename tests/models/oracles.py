"""Tiny random models in transformers, as references for the decoder. Float32, eager attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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


def _eager(config: Any) -> Any:
    config._attn_implementation = "eager"
    return config


ORACLES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "llama-untied-biases": lambda: _llama(tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "llama-linear": lambda: _llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama-wide-heads": lambda: _llama(head_dim=40, num_attention_heads=8, num_key_value_heads=2),
    "qwen3-yarn": lambda: _qwen3(rope_parameters=_YARN),
    "qwen3-tied-groups-of-three": lambda: _qwen3(tie_word_embeddings=True, num_attention_heads=6, num_key_value_heads=2),
}
GREEDY = {"llama": [140, 118, 118, 118], "qwen3": [3, 212, 7, 81]}
"""What these two generate after `oracle_prompt()`, as recorded when they were made."""


def build(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = ORACLES[name]().to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():  # transformers starts norms at one and biases at zero, where they test nothing
        for key, tensor in model.named_parameters():
            if "norm" in key and key.endswith("weight"):
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
            elif key.endswith("bias"):
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
