"""GLM-4: norms around each block, and half of each head rotated, neighbouring dimensions against each other."""

from __future__ import annotations

import msgspec

from common.models.families.common import read_attention, read_model, read_rope, read_silu_mlp
from common.models.families.gguf import Q_BIAS, SANDWICH_NORMS, gguf_attention, gguf_mlp, gguf_model
from common.models.fields import Fields
from common.models.spec import LayerNames, LayerSpec, ModelSpec, WeightNames

_NAMES = WeightNames(
    layer=LayerNames(
        gate_up=("mlp.gate_up_proj",),
        mixer_norms=("input_layernorm", "post_self_attn_layernorm"),
        mlp_norms=("post_attention_layernorm", "post_mlp_layernorm"),
    )
)
_GGUF_NAMES = msgspec.structs.replace(
    SANDWICH_NORMS, layer=msgspec.structs.replace(SANDWICH_NORMS.layer, gate_up=("mlp.up_proj",))
)
_HEAD_DIM, _ROTATED = 128, 0.5


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    mixer = read_attention(fields, None, head_dim=_HEAD_DIM, qkv_bias=fields.flag("attention_bias", True))
    rope = read_rope(fields, head_dim=mixer.head_dim, share=_ROTATED)
    rope = msgspec.structs.replace(rope, interleaved=True)
    layer = LayerSpec(mixer=msgspec.structs.replace(mixer, rope=rope), mlp=read_silu_mlp(fields), norms="sandwich")
    layers = [layer] * fields.size("num_hidden_layers")
    return read_model(fields, "glm4", layers, names=_NAMES, rms_eps=1.5625e-7)


def from_gguf(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    mixer = gguf_attention(fields, partial=True, qkv_bias=bool(fields.numbers(Q_BIAS)))  # the 32B model has none
    assert mixer.rope is not None
    rope = msgspec.structs.replace(mixer.rope, interleaved=True)
    layer = LayerSpec(mixer=msgspec.structs.replace(mixer, rope=rope), mlp=gguf_mlp(fields), norms="sandwich")
    return gguf_model(fields, "glm4", [layer] * fields.size("block_count"), names=_GGUF_NAMES)
