"""The config.json from which a peer builds the model that we run."""

from __future__ import annotations

import json
from typing import Any

from common.models.source import ModelFiles
from common.protocol.errors import ConfigError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "mimo": "MiMoForCausalLM",
}


def hugging_face_config(files: ModelFiles) -> dict[str, Any]:
    """The model's own config.json, with what ours leaves out. :raises ConfigError: if it has none, or names no architecture."""
    path = files.path / "config.json"
    if not path.is_file():
        raise ConfigError(f"a peer needs a config.json, and {files.name} has none")
    config: dict[str, Any] = json.loads(path.read_bytes())
    kind = str(config.get("model_type"))
    if "architectures" not in config and kind not in _ARCHITECTURES:
        raise ConfigError(f"a peer is not told of model_type {kind!r}")
    return {
        "architectures": [_ARCHITECTURES.get(kind)],
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | config
