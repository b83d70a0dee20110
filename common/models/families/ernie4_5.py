"""ERNIE 4.5, dense: Llama whose neighbouring dimensions turn against each other."""

from __future__ import annotations

import msgspec

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec

_HEAD_DIM, _THETA = 128, 500_000.0


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    bias = fields.flag("use_bias")
    rope = msgspec.structs.replace(read_rope(fields, theta=_THETA), interleaved=True)
    mixer = read_attention(fields, rope, head_dim=_HEAD_DIM, qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(mixer=mixer, mlp=read_silu_mlp(fields, bias=bias))
    return read_model(fields, "ernie4_5", [layer] * fields.size("num_hidden_layers"), tied=True, rms_eps=1e-5)
