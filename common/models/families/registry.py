"""The families that are served, by the names that config.json and GGUF metadata give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.models.families import (
    cwm,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    llama4,
    mimo,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from common.models.families.wrappers import WRAPPERS
from common.models.fields import Fields
from common.models.spec import ModelSpec
from common.protocol.errors import ConfigError

Reader = Callable[[Fields], ModelSpec]

JSON_FAMILIES: dict[str, Reader] = {
    "llama": llama.from_json,
    "mistral": mistral.from_json,
    "ministral": mistral.ministral,
    "ministral3": ministral3.from_json,
    "qwen2": qwen2.from_json,
    "mimo": mimo.from_json,
    "qwen3": qwen3.from_json,
    "gemma": gemma.from_json,
    "gemma2": gemma2.from_json,
    "gemma3_text": gemma3.from_json,
    "phi3": phi3.from_json,
    "olmo2": olmo2.from_json,
    "olmo3": olmo3.from_json,
    "smollm3": smollm3.from_json,
    "glm4": glm4.from_json,
    "glm4_moe": glm4_moe.from_json,
    "granite": granite.from_json,
    "granitemoehybrid": granite.hybrid,
    "ernie4_5": ernie4_5.from_json,
    "ernie4_5_moe": ernie4_5.with_experts,
    "exaone4": exaone4.from_json,
    "seed_oss": seed_oss.from_json,
    "cwm": cwm.from_json,
    "olmoe": olmoe.from_json,
    "mixtral": mixtral.from_json,
    "qwen3_moe": qwen3_moe.from_json,
    "gpt_oss": gpt_oss.from_json,
    "llama4_text": llama4.from_json,
}
"""`model_type` of config.json."""

GGUF_FAMILIES: dict[str, Reader] = {
    "llama": llama.from_gguf,
    "qwen2": qwen2.from_gguf,
    "qwen3": qwen3.from_gguf,
    "qwen3moe": qwen3_moe.from_gguf,
    "gemma": gemma.from_gguf,
    "gemma2": gemma2.from_gguf,
    "gemma3": gemma3.from_gguf,
    "phi3": phi3.from_gguf,
    "olmo2": olmo3.from_gguf,
    "smollm3": smollm3.from_gguf,
    "glm4": glm4.from_gguf,
    "glm4moe": glm4_moe.from_gguf,
    "granite": granite.from_gguf,
    "ernie4_5": ernie4_5.from_gguf,
    "ernie4_5-moe": ernie4_5.experts_from_gguf,
    "exaone4": exaone4.from_gguf,
    "seed_oss": seed_oss.from_gguf,
    "mistral3": ministral3.from_gguf,
    "olmoe": olmoe.from_gguf,
    "gpt-oss": gpt_oss.from_gguf,
}
"""`general.architecture` of GGUF metadata."""


def reader_of(name: object, families: Mapping[str, Reader], where: str) -> Reader:
    """Return what reads this family. where: what the name is, for the error.

    :raises ConfigError: with the list of what is served, if it is not among `families`.
    """
    if not isinstance(name, str) or name not in families:
        served = ", ".join(families)
        if families is JSON_FAMILIES:
            served += f", and the text part of {', '.join(WRAPPERS)}"
        raise ConfigError(f"{where} {name!r} is not supported; supported are {served}")
    return families[name]
