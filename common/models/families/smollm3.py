"""SmolLM3: Llama whose every fourth layer has no positions."""

from __future__ import annotations

import msgspec

from common.models.families.common import (
    all_but_every,
    read_attention,
    read_model,
    read_rope,
    read_rotated,
    read_silu_mlp,
    read_windows,
)
from common.models.families.gguf import PAIRED, gguf_attention, gguf_mlp, gguf_model
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec

_THETA = 2_000_000.0
_INTERVAL = 4
"""Of layers without positions in GGUF files, which do not say it."""
_UNREAD = ("max_window_layers", "pretraining_tp")
"""Keys of the published file that transformers does not read in this family."""


def from_json(fields: Fields) -> ModelSpec:
    """Layers without positions have the window, if there is one.

    :raises ConfigError: if a field is missing, wrong or unknown.
    """
    for key in _UNREAD:
        fields.get(key)
    rotated, found = read_rotated(fields), fields.get("sliding_window")
    window = fields.size("sliding_window") if fields.flag("use_sliding_window") and found else 0
    kinds = ["sliding_attention" if window and not one else "full_attention" for one in rotated]
    windows = read_windows(fields, kinds, window=window)
    rope, bias = read_rope(fields, theta=_THETA), fields.flag("attention_bias")
    mlp = read_silu_mlp(fields, bias=fields.flag("mlp_bias"))
    layers = [
        LayerSpec(
            mixer=read_attention(fields, rope if turned else None, window=one, qkv_bias=bias, output_bias=bias),
            mlp=mlp,
        )
        for turned, one in zip(rotated, windows, strict=True)
    ]
    return read_model(fields, "smollm3", layers, tied=True)


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    mixer, mlp = gguf_attention(fields), gguf_mlp(fields)
    layers = [
        LayerSpec(mixer=mixer if one else msgspec.structs.replace(mixer, rope=None), mlp=mlp)
        for one in all_but_every(_INTERVAL, fields.size("block_count"))
    ]
    return gguf_model(fields, "smollm3", layers, names=PAIRED)
