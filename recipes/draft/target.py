"""Loads a target for training: its decoder, embedding and head in plain torch, from the same files that Penstock serves.

Only Llama's architecture is taken: full causal attention with plain rotary positions, gated SiLU, norms before each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from common.models.config import ModelConfig, load_config
from common.models.registry import open_weights
from common.models.source import ModelFiles
from common.models.spec import DenseSpec, LayerSpec, RopeSpec
from common.models.weights.source import WeightSource
from common.models.weights.upload import Upload
from common.protocol.errors import ConfigError
from recipes.draft.llama import Decoder, LlamaShape


@dataclass(frozen=True, slots=True)
class Target:
    """embedding, head: [vocab, hidden] in `dtype`; the same tensor where the model ties them. Nothing of it is trained."""

    name: str
    revision: str
    shape: LlamaShape
    decoder: Decoder
    embedding: torch.Tensor
    head: torch.Tensor

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [batch, tokens]. Returns the final hidden states, [batch, tokens, hidden]."""
        return self.decoder(self.embedding[tokens])

    @torch.no_grad()
    def states(self, tokens: torch.Tensor, layer_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens: int64 [batch, tokens]. Returns the residuals that enter those layers, side by side, [batch, tokens,
        len(layer_ids) * hidden], and the final hidden states, [batch, tokens, hidden]; see `Decoder.residuals`."""
        *found, last = self.decoder.residuals(self.embedding[tokens], [*layer_ids, len(self.decoder.layers)])
        return torch.cat(found, -1), self.decoder.norm(last)


def shape_of(config: ModelConfig) -> LlamaShape:
    """:raises ConfigError: if the model is not a plain Llama."""
    layer = config.layers[0]
    mixer, mlp = layer.mixer, layer.mlp
    if any(other != layer for other in config.layers) or not isinstance(mlp, DenseSpec):
        raise ConfigError("this recipe takes targets whose layers are all alike and dense")
    plain = LayerSpec(
        mixer=type(mixer)(
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            scale=mixer.scale,
            rope=RopeSpec(theta=mixer.rope.theta, original_max_context=mixer.rope.original_max_context) if mixer.rope else None,
        ),
        mlp=DenseSpec(intermediate_size=mlp.intermediate_size),
    )
    unusual = config.embedding_scale != 1 or config.logit_soft_cap or config.zero_centred_norms
    if unusual or layer != plain or mixer.rope is None or abs(mixer.scale - mixer.head_dim**-0.5) > 1e-6:
        raise ConfigError("this recipe takes targets of Llama's architecture only")
    return LlamaShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=mlp.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=mixer.num_heads,
        num_key_value_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        rms_norm_eps=config.rms_eps,
        rope_theta=mixer.rope.theta,
        max_position_embeddings=config.max_context,
    )


def load_target(files: ModelFiles, device: torch.device, dtype: torch.dtype) -> Target:
    """Read all weights, dequantised to `dtype`.

    :raises ConfigError: if the model is not a plain Llama, or its files are damaged.
    """
    config = load_config(files)
    shape = shape_of(config)
    source = open_weights(files, config)
    upload = Upload(device, dtype)

    def read(name: str) -> torch.Tensor:
        return _read(source, name, upload).to(device, dtype)

    with torch.device("meta"):
        decoder = Decoder(shape)
    state = {name: read(f"model.{name}") for name in decoder.state_dict()}
    decoder.load_state_dict(state, assign=True)
    embedding = read("model.embed_tokens.weight")
    tied = config.tie_embeddings or "lm_head.weight" not in source.shapes
    frozen(decoder)
    return Target(files.name, files.revision, shape, decoder.eval(), embedding, embedding if tied else read("lm_head.weight"))


def frozen(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def _read(source: WeightSource, name: str, upload: Upload) -> torch.Tensor:
    if name not in source.shapes:
        raise ConfigError(f"the target holds no {name}")
    return source.read(name, upload)
