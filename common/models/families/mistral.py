"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp, read_windows
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec

_WINDOW = 4096
"""Where the file has no such key; null is no window."""


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    has_none = "sliding_window" in fields.data and fields.get("sliding_window") is None
    window = 0 if has_none else fields.size("sliding_window", _WINDOW)
    kind = "sliding_attention" if window else "full_attention"
    rope, mlp = read_rope(fields), read_silu_mlp(fields)
    windows = read_windows(fields, [kind] * fields.size("num_hidden_layers"), window=window)
    layers = [LayerSpec(mixer=read_attention(fields, rope, window=one), mlp=mlp) for one in windows]
    return read_model(fields, "mistral", layers)
