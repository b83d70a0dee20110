"""The draft model: a small Llama decoder between the target's embedding and some rows of the target's head."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import nn

from common.protocol.errors import ConfigError
from recipes.draft.llama import Decoder, Layer, LlamaShape, Mlp
from recipes.draft.target import Target


class DraftModel(nn.Module):
    """embedding: [vocab, hidden]; head: [draft_vocab, hidden], rows `ids` of the target's. Both are the target's and not
    trained.

    ids: int64 [draft_vocab], the target's id of each draft id.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    ids: torch.Tensor

    def __init__(self, shape: LlamaShape, embedding: torch.Tensor, head: torch.Tensor, ids: torch.Tensor) -> None:
        super().__init__()
        if embedding.shape != (shape.vocab_size, shape.hidden_size) or head.shape != (len(ids), shape.hidden_size):
            raise ConfigError(
                f"a draft model of hidden size {shape.hidden_size} and {len(ids)} ids does not fit an embedding "
                f"{list(embedding.shape)} and a head {list(head.shape)}"
            )
        self.shape = shape
        self.model = Decoder(shape)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("ids", ids, persistent=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [batch, tokens], the target's ids. Returns [batch, tokens, hidden]."""
        return self.model(self.embedding[tokens].to(self.model.norm.weight.dtype))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [..., hidden]. Returns [..., draft_vocab]."""
        return hidden @ self.head.to(hidden.dtype).T


@dataclass(frozen=True, slots=True)
class DraftSize:
    """layers, intermediate_size: of the draft model; intermediate_size 0: half of the target's."""

    layers: int = 2
    intermediate_size: int = 0


def new_draft(target: Target, ids: torch.Tensor, size: DraftSize) -> DraftModel:
    """Return a draft model in fp32 that begins with the target's first and last layers and its final norm.

    An MLP that is narrower than the target's keeps the neurons with the largest product of weight norms.

    :raises ConfigError: if it would be larger than the target, or an id is outside the vocabulary.
    """
    intermediate = size.intermediate_size or target.shape.intermediate_size // 2
    if not 1 <= size.layers <= target.shape.num_hidden_layers or not 1 <= intermediate <= target.shape.intermediate_size:
        raise ConfigError(
            f"a draft model has 1 to {target.shape.num_hidden_layers} layers and an MLP of 1 to "
            f"{target.shape.intermediate_size}, not {size.layers} and {intermediate}"
        )
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= target.shape.vocab_size:
        raise ConfigError(f"the draft vocabulary must be ids below {target.shape.vocab_size}")
    shape = msgspec.structs.replace(target.shape, num_hidden_layers=size.layers, intermediate_size=intermediate)
    ids = ids.to(target.head.device)
    draft = DraftModel(shape, target.embedding, target.head[ids], ids).to(target.head.device)
    first = -(-size.layers // 2)
    last = size.layers - first
    sources = [*target.decoder.layers[:first], *target.decoder.layers[len(target.decoder.layers) - last :]]
    with torch.no_grad():
        for layer, source in zip(draft.model.layers, sources, strict=True):
            assert isinstance(layer, Layer) and isinstance(source, Layer)
            copy_layer(layer, source)
        draft.model.norm.weight.copy_(target.decoder.norm.weight)
    return draft


def copy_layer(layer: Layer, source: Layer) -> None:
    """Give `layer` the weights of `source`, whose MLP may be wider."""
    layer.self_attn.load_state_dict(source.self_attn.state_dict())
    layer.input_layernorm.load_state_dict(source.input_layernorm.state_dict())
    layer.post_attention_layernorm.load_state_dict(source.post_attention_layernorm.state_dict())
    kept = largest_neurons(source.mlp, layer.mlp.gate_proj.out_features)
    layer.mlp.gate_proj.weight.copy_(source.mlp.gate_proj.weight[kept])
    layer.mlp.up_proj.weight.copy_(source.mlp.up_proj.weight[kept])
    layer.mlp.down_proj.weight.copy_(source.mlp.down_proj.weight[:, kept])


def largest_neurons(mlp: Mlp, count: int) -> torch.Tensor:
    """Return the indices of `count` neurons in ascending order, int64."""
    gate, up, down = (linear.weight.float() for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    importance = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    return importance.topk(count).indices.sort().values
