"""CWM: Llama whose every fourth layer, from the first on, sees everything, and whose others have a window."""

from __future__ import annotations

from typing import Any

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp, read_windows
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec

_WINDOW, _PERIOD, _HEAD_DIM = 8192, 4, 128
_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Where the file has no such key."""


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    rope, mlp = read_rope(fields, default=_ROPE), read_silu_mlp(fields, bias=fields.flag("mlp_bias"))
    layers = range(fields.size("num_hidden_layers"))
    kinds = ["sliding_attention" if layer % _PERIOD else "full_attention" for layer in layers]
    windows = read_windows(fields, kinds, window=fields.size("sliding_window", _WINDOW))
    mixers = [read_attention(fields, rope, head_dim=_HEAD_DIM, window=one) for one in windows]
    return read_model(fields, "cwm", [LayerSpec(mixer=mixer, mlp=mlp) for mixer in mixers], rms_eps=1e-5)
