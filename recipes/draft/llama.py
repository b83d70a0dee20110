"""A Llama decoder in plain torch, for training: no cache, whole sequences, Hugging Face's names of weights.

The target and the draft model are both a `Decoder`; embedding and head belong to whoever calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import nn
from torch.nn import functional


class LlamaShape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a Llama decoder, with the names of Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int


class RmsNorm(nn.Module):
    """Root-mean-square norm in fp32, as transformers computes it."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]. Returns the same shape and dtype."""
        if x.is_cuda and not torch.is_grad_enabled() and x.dtype == self.weight.dtype:
            # one kernel instead of six: most of a frozen target's time is in kernels as small as these
            return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon).to(x.dtype)
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * normal.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions. input_size: of what it reads, if not the hidden size."""

    def __init__(self, shape: LlamaShape, input_size: int = 0) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        input_size = input_size or shape.hidden_size
        self.q_proj = nn.Linear(input_size, queries, bias=False)
        self.k_proj = nn.Linear(input_size, keys, bias=False)
        self.v_proj = nn.Linear(input_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """x: [batch, tokens, input_size]; cosines, sines: [tokens, head_dim]. Returns [batch, tokens, hidden]."""
        query, key, value = self.projected(x, cosines, sines)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.joined(mixed)

    def projected(
        self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [batch, tokens, input_size]. Returns queries and keys, rotated, and values, each [batch, heads, tokens,
        head_dim] with heads of its own."""
        batch, tokens, _ = x.shape
        head = self.shape.head_dim
        query = rotate(self.q_proj(x).view(batch, tokens, -1, head).transpose(1, 2), cosines, sines)
        key = rotate(self.k_proj(x).view(batch, tokens, -1, head).transpose(1, 2), cosines, sines)
        return query, key, self.v_proj(x).view(batch, tokens, -1, head).transpose(1, 2)

    def joined(self, mixed: torch.Tensor) -> torch.Tensor:
        """mixed: [batch, heads, tokens, head_dim], what attention read. Returns [batch, tokens, hidden]."""
        batch, _, tokens, _ = mixed.shape
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    """Gated feed-forward with SiLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer with norms before attention and MLP."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Layers and the final norm."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        """embedded: [batch, tokens, hidden], sequences from position 0 on, padded on the right (which a causal mask hides).

        Returns the final hidden states, [batch, tokens, hidden].
        """
        return self.norm(self.residuals(embedded, [len(self.layers)])[0])

    def residuals(self, embedded: torch.Tensor, layer_ids: Sequence[int]) -> list[torch.Tensor]:
        """Return the residual stream that enters each of the layers, [batch, tokens, hidden] each, in the order of `layer_ids`.

        The number of layers stands for what the last one leaves, before the final norm. Other arguments: see `forward`.
        """
        cosines, sines = rotary_tables(embedded.shape[1], self.shape, embedded.device)
        cosines, sines = cosines.to(embedded.dtype), sines.to(embedded.dtype)
        x = embedded
        found = {0: x}
        for number, layer in enumerate(self.layers, 1):
            x = layer(x, cosines, sines)
            if number in layer_ids:
                found[number] = x
        return [found[number] for number in layer_ids]


def rotary_tables(tokens: int, shape: LlamaShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of positions 0 to tokens - 1, each float32 [tokens, head_dim]."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    angles = torch.outer(torch.arange(tokens, device=device).float(), shape.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """x: [batch, heads, tokens, head_dim]. Returns it rotated, halves against each other."""
    cosines, sines = cosines.to(x.dtype), sines.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-second, first], dim=-1) * sines
