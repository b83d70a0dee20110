"""Ministral 3: Mistral without windows, whose queries grow with their positions beyond the context it was first trained for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.models.families.common import read_rope
from common.models.families.mistral import mistral_model
from common.models.fields import Fields
from common.models.spec import ModelSpec, QueryTemperature
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
    temperature = QueryTemperature(scale=beta, floor=rope.original_max_context, shift=0)
    return mistral_model(fields, "ministral3", rope, window=0, temperature=temperature if beta else None)
