"""Mistral, and the Ministral of 2024: Llama with a sliding window in every layer, or in those that the file lists."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp, read_window, read_windows
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec, QueryTemperature, RopeSpec

_WINDOW = 4096
"""Where the file has no such key; null is no window."""


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    return mistral_model(fields, "mistral", read_rope(fields), window=_WINDOW)


def ministral(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    return mistral_model(fields, "ministral", read_rope(fields), window=_WINDOW)


def mistral_model(
    fields: Fields, architecture: str, rope: RopeSpec, *, window: int, temperature: QueryTemperature | None = None
) -> ModelSpec:
    """window: where the file has no such key; 0 for none."""
    window = read_window(fields, window)
    kind = "sliding_attention" if window else "full_attention"
    mlp = read_silu_mlp(fields)
    windows = read_windows(fields, [kind] * fields.size("num_hidden_layers"), window=window)
    mixers = [read_attention(fields, rope, window=one, temperature=temperature) for one in windows]
    return read_model(fields, architecture, [LayerSpec(mixer=mixer, mlp=mlp) for mixer in mixers])
