"""SmolLM3: Llama whose every fourth layer has no positions."""

from __future__ import annotations

import msgspec

from common.models.families.common import (
    read_attention,
    read_model,
    read_rope,
    read_rotated,
    read_silu_mlp,
    read_windows,
    rotated_but_every,
)
from common.models.families.gguf import PAIRED, gguf_attention, gguf_mlp, gguf_model
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec

_THETA = 2_000_000.0
_INTERVAL = 4
"""Of layers without positions in GGUF files, which do not say it."""


def from_json(fields: Fields) -> ModelSpec:
    """Layers without positions have the window, if there is one.

    :raises ConfigError: if a field is missing, wrong or unknown.
    """
    rotated, has_window = read_rotated(fields), fields.get("use_sliding_window") and fields.get("sliding_window")
    kinds = ["sliding_attention" if has_window and not one else "full_attention" for one in rotated]
    windows = read_windows(fields, kinds, window=fields.size("sliding_window") if has_window else 0)
    rope, bias = read_rope(fields, theta=_THETA), fields.flag("attention_bias")
    mlp = read_silu_mlp(fields, bias=fields.flag("mlp_bias"))
    layers = [
        LayerSpec(
            mixer=read_attention(fields, rope if one else None, window=window, qkv_bias=bias, output_bias=bias),
            mlp=mlp,
        )
        for one, window in zip(rotated, windows, strict=True)
    ]
    return read_model(fields, "smollm3", layers, tied=True)


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    mixer, mlp = gguf_attention(fields), gguf_mlp(fields)
    layers = [
        LayerSpec(mixer=mixer if one else msgspec.structs.replace(mixer, rope=None), mlp=mlp)
        for one in rotated_but_every(_INTERVAL, fields.size("block_count"))
    ]
    return gguf_model(fields, "smollm3", layers, names=PAIRED)
