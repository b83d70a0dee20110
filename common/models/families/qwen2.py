"""Qwen2 and Qwen2.5: biases on Q, K and V, and a window in the last layers where it is switched on."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp, read_windows
from common.models.families.gguf import gguf_attention, gguf_mlp, gguf_model
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    rope, mlp = read_rope(fields), read_silu_mlp(fields)
    layers = [LayerSpec(mixer=read_attention(fields, rope, window=one, qkv_bias=True), mlp=mlp) for one in last_windows(fields)]
    return read_model(fields, "qwen2", layers)


def last_windows(fields: Fields) -> list[int]:
    """Return each layer's window: the layers from `max_window_layers` on have one, if `use_sliding_window` says so."""
    layers, first = fields.size("num_hidden_layers"), fields.number("max_window_layers", 28)
    used = fields.flag("use_sliding_window")
    window = fields.get("sliding_window") and fields.size("sliding_window") if used else fields.get("sliding_window", 0) and 0
    kinds = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    return read_windows(fields, kinds, window=window or 0)


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    layer = LayerSpec(mixer=gguf_attention(fields, qkv_bias=True), mlp=gguf_mlp(fields))
    return gguf_model(fields, "qwen2", [layer] * fields.size("block_count"))
