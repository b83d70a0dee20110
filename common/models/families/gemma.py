"""Gemma, the first: heads of 256, scaled embeddings, and norms that the files hold as w for 1 + w."""

from __future__ import annotations

from common.models.families.common import read_attention, read_model, read_rope
from common.models.families.gguf import gguf_attention, gguf_mlp, gguf_model
from common.models.fields import Fields
from common.models.spec import DenseSpec, LayerSpec, ModelSpec
from common.protocol.errors import ConfigError

_HEAD_DIM = 256
_GELU = ("gelu_pytorch_tanh", "gelu")
"""The second is what the first published files call the first: the models were trained with the tanh."""


def from_json(fields: Fields) -> ModelSpec:
    """:raises ConfigError: if a field is missing, wrong or unknown."""
    for name in ("hidden_act", "hidden_activation"):
        if (found := fields.get(name, _GELU[0])) not in _GELU:
            raise ConfigError(f"{name} {found!r} is not supported; {fields.where} may have {_GELU[0]!r}")
    bias = fields.flag("attention_bias")
    mixer = read_attention(fields, read_rope(fields), head_dim=_HEAD_DIM, qkv_bias=bias, output_bias=bias)
    mlp = DenseSpec(intermediate_size=fields.size("intermediate_size"), activation="gelu_tanh")
    return read_model(
        fields,
        "gemma",
        [LayerSpec(mixer=mixer, mlp=mlp)] * fields.size("num_hidden_layers"),
        tied=True,
        embedding_scale=fields.size("hidden_size") ** 0.5,
        zero_centred_norms=True,
    )


def from_gguf(fields: Fields) -> ModelSpec:
    """Norms are plain factors in GGUF files.

    :raises ConfigError: if a field is missing, wrong or unknown.
    """
    layer = LayerSpec(mixer=gguf_attention(fields), mlp=gguf_mlp(fields, activation="gelu_tanh"))
    scale = fields.size("embedding_length") ** 0.5
    return gguf_model(fields, "gemma", [layer] * fields.size("block_count"), embedding_scale=scale)
