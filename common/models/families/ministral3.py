"""Ministral 3: Mistral without windows, whose queries grow with their positions beyond the context it was first trained for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from common.models.families.common import read_rope
from common.models.families.gguf import PAIRED, gguf_attention, gguf_mlp, gguf_model, gguf_rope
from common.models.families.mistral import mistral_model
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec, QueryTemperature, RopeSpec
from common.protocol.errors import ConfigError

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Where the file has no such key."""
_BETA = "llama_4_scaling_beta"


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    rope = read_rope(fields, default=_ROPE, own=(_BETA, "max_position_embeddings"))
    found = fields.get("rope_parameters", _ROPE)
    if not isinstance(found, Mapping) or _BETA not in found:
        raise ConfigError(f"rope_parameters in {fields.where} must have {_BETA}, which this family's queries grow by")
    beta = Fields(found, "rope_parameters").not_negative(_BETA, 0.0)
    return mistral_model(fields, "ministral3", rope, window=0, temperature=_temperature(beta, rope))


def from_gguf(fields: Fields) -> ModelSpec:
    """Files of Mistral Small 3 say that they are of this family, too, and have neither YaRN nor a temperature.

    :raises ConfigError: if a field is missing, wrong or unknown.
    """
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier"):
        fields.only(name, 1.0)
    rope = gguf_rope(fields)
    rope = msgspec.structs.replace(rope, attention_factor=1.0) if rope.type == "yarn" else rope
    beta = fields.not_negative("attention.temperature_scale", 0.0)
    layer = LayerSpec(mixer=gguf_attention(fields, rope=rope, temperature=_temperature(beta, rope)), mlp=gguf_mlp(fields))
    return gguf_model(fields, "ministral3", [layer] * fields.size("block_count"), names=PAIRED)


def _temperature(beta: float, rope: RopeSpec) -> QueryTemperature | None:
    return QueryTemperature(scale=beta, floor=rope.original_max_context, shift=0) if beta else None
