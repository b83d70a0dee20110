"""Named shapes of models that need no download: `--model dummy:llama-3.1-8b`. For benchmarks and tests.

The name of any of them may end in `-N-layers`: the same shape with so many layers (`dummy:qwen3-235b-a22b-8-layers`). Behind
that it may say which random numbers there are (`Numbers`):

    -uniform      as vLLM's `--load-format dummy` has them, to compare with it
    -counting     whatever is computed, the token after token t is t + 1: answers are known, and no rounding changes one
    -counting-80  that is so behind 80 % of all tokens, a draft model whose acceptance is known; behind the others it says
                  t + 2, and for half of those t + 1 is its second choice

`write_model` makes a model folder of one: config.json as published, and a tokenizer in which a byte of text is a token, and a
token that the random weights choose is some text. No weights: those are made up while loading (see `weights.dummy`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

_VERSION = 1
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}
_LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500_000.0}
_LLAMA_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_QWEN3: dict[str, Any] = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "vocab_size": 151_936, "max_position_embeddings": 40_960}
_QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1_000_000.0, "tie_word_embeddings": False}

_QWEN3_MOE: dict[str, Any] = _QWEN3 | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128}
_QWEN3_MOE |= {"num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "rms_norm_eps": 1e-5,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "rope_theta": 150_000.0,
    "quantization_config": {"quant_method": "mxfp4"},
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    | {"original_max_position_embeddings": 4096},
}
_FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "tie_word_embeddings": False}
    | {"rope_scaling": _LLAMA_ROPE | {"factor": 8.0}},
    "llama-3.2-1b": _LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64, "tie_word_embeddings": True}
    | {"rope_scaling": _LLAMA_ROPE | {"factor": 32.0}},
    "qwen3-8b": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-32b": _QWEN3
    | {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "mimo-7b": {
        "model_type": "mimo",
        "rms_norm_eps": 1e-5,
        "vocab_size": 151_680,
        "max_position_embeddings": 32_768,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 640_000.0,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": _LLAMA
    | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "vocab_size": 49_152, "max_position_embeddings": 8192, "rope_theta": 100_000.0}
    | {"tie_word_embeddings": True},
    "tiny": _LLAMA
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "rope_theta": 10_000.0}
    | {"tie_word_embeddings": True},
}

_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
SHAPES |= {f"{name}-awq": SHAPES[name] | {"quantization_config": _AWQ} for name in ("llama-3.1-8b", "llama-3.2-1b")}
SHAPES |= {
    "qwen3-30b-a3b": _QWEN3_MOE
    | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    | {"num_attention_heads": 32},
    "qwen3-235b-a22b": _QWEN3_MOE
    | {"hidden_size": 4096, "intermediate_size": 12_288, "moe_intermediate_size": 1536, "num_hidden_layers": 94}
    | {"num_attention_heads": 64},
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "rms_norm_eps": 1e-5,
        "vocab_size": 32_000,
        "max_position_embeddings": 32_768,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
}
SHAPES["qwen3-30b-a3b-fp8"] = SHAPES["qwen3-30b-a3b"] | {"quantization_config": _FP8_BLOCKS}

_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


_NAME = re.compile(
    r"(?P<shape>.+?)(?:-(?P<layers>[1-9]\d{0,2})-layers)?(?:-(?P<uniform>uniform)|-counting(?:-(?P<right>\d{1,2}))?)?"
)
_COUNTING = re.compile(r"-counting(?:-\d{1,2})?$")


class Numbers(NamedTuple):
    """The random numbers of a shape. uniform: as vLLM's dummy weights. right: of a model that counts, behind which share of the
    tokens it does; None: it does not."""

    uniform: bool = False
    right: float | None = None


def numbers(name: str) -> Numbers:
    """Return what the end of a shape's name asks for."""
    found = _NAME.fullmatch(name)
    if found is None or not _COUNTING.search(name):
        return Numbers(uniform=found is not None and found["uniform"] is not None)
    return Numbers(right=1.0 if found["right"] is None else int(found["right"]) / 100)


def shape(name: str) -> dict[str, Any]:
    """Return the config.json of shape `name` with the ends that it may have. :raises KeyError: if there is none."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise KeyError(name)
    config = SHAPES[found["shape"]]
    if found["layers"]:
        config = config | {"num_hidden_layers": int(found["layers"])}
    return config if numbers(name).right is None else config | {"tie_word_embeddings": False}


def folder_name(name: str) -> str:
    """Where shape `name` lies among others; another one whenever the files would differ."""
    return f"{name}-v{_VERSION}"


def write_model(name: str, folder: Path) -> None:
    """Fills `folder`. :raises KeyError: if there is no such shape. :raises OSError: if it can't be written."""
    config = shape(name)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(config["vocab_size"])))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def byte_tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return a tokenizer.json: byte-level BPE that never merges.

    Ids past the bytes are words, " 256" and so on, which no text becomes.
    """
    vocab = {character: token for token, character in enumerate(_byte_characters())}
    vocab |= {f"\u0120{token}": token for token in range(len(vocab), vocab_size)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model | {"vocab": vocab, "merges": []},
    }


def _byte_characters() -> list[str]:
    """GPT-2's printable character for each byte: its own, or the next from U+0100 on."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters: list[str] = []
    for byte in range(256):
        shift = sum(1 for other in range(byte) if other not in own)
        characters.append(chr(byte if byte in own else 0x100 + shift))
    return characters
