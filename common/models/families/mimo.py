"""MiMo-7B: Qwen2's decoder. The layer for multi-token prediction beside it is a head (`common.models.head_config.mtp_spec`)."""

from __future__ import annotations

import msgspec

from common.models.families import qwen2
from common.models.fields import Fields
from common.models.spec import ModelSpec


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    fields.only("attention_bias", True)
    fields.not_negative("num_nextn_predict_layers", 0)
    return msgspec.structs.replace(qwen2.from_json(fields), architecture="mimo")
