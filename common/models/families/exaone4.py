"""EXAONE 4: norms behind each block, and over each head; where some layers have a window, the others have no positions."""

from __future__ import annotations

import msgspec

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp, read_window, read_windows
from common.models.families.gguf import POST_NORMS, gguf_attention, gguf_mlp, gguf_model, gguf_windows
from common.models.families.olmo2 import NAMES
from common.models.fields import Fields
from common.models.spec import LayerSpec, ModelSpec

_WINDOW, _PERIOD = 4096, 4


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    window = read_window(fields, _WINDOW)
    rope, mlp = read_rope(fields), read_silu_mlp(fields)
    layers = [
        LayerSpec(
            mixer=read_attention(fields, rope if one or not window else None, window=one, qk_norm="head"),
            mlp=mlp,
            norms="post",
        )
        for one in read_windows(fields, _kinds(fields, window), window=window)
    ]
    return read_model(fields, "exaone4", layers, names=NAMES, rms_eps=1e-5)


def _kinds(fields: Fields, window: int) -> list[str]:
    """Return each layer's type where the file lists none, from a period, or from a text of L and G that is repeated.

    :raises ConfigError: if it is neither.
    """
    layers, pattern = fields.size("num_hidden_layers"), fields.get("sliding_window_pattern", _PERIOD)
    if not window:
        return ["full_attention"] * layers
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        local = [pattern[layer % len(pattern)] == "L" for layer in range(layers)]
        local[-1] = False
    else:
        period = fields.size("sliding_window_pattern", _PERIOD)
        local = [bool((layer + 1) % period) for layer in range(layers)]
    return ["sliding_attention" if one else "full_attention" for one in local]


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    mixer, mlp = gguf_attention(fields, qk_norm="head"), gguf_mlp(fields)
    windows = gguf_windows(fields, _PERIOD)
    layers = [
        LayerSpec(
            mixer=msgspec.structs.replace(mixer, window=one, rope=mixer.rope if one or not any(windows) else None),
            mlp=mlp,
            norms="post",
        )
        for one in windows
    ]
    return gguf_model(fields, "exaone4", layers, names=POST_NORMS)
