"""The decoder that Llama and Qwen3 share: pre-norm, grouped-query attention with RoPE, SwiGLU.

What differs between models (QK norm, biases, head size, rope scaling, tied embeddings) is configuration. Q, K and V are one
matrix here, and so are gate and up. A step's tokens are flat: rows of all sequences, one after the other, go through the
linears together; only attention knows where a row begins.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from common.models.attention import Attention
from common.models.config import ModelConfig
from common.models.rope import RopeTable, inverse_frequencies
from common.models.weights.base import WeightLoader
from common.ops.linear.embed import embed
from common.ops.linear.gate_up import gate_up
from common.ops.linear.linear import linear, takes_quantised
from common.ops.linear.weight import LinearWeight, Role
from common.ops.norm.add_rms_norm import add_rms_norm
from common.ops.tensors import Feed

ROPE_FACTORS = "rope_freqs.weight"


class KvForm(TypedDict):
    """How K and V are written: arguments of `ops.kv.qkv_rope`."""

    kv_scale: torch.Tensor | None
    k_center: torch.Tensor | None
    mix: bool


LinearPlace = tuple[int, Role]
"""A linear of a layer."""

MODULES: dict[Role, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""What the files call the parts of a layer's linears."""


@dataclass(slots=True)
class Inputs:
    """One step. tokens: int64 [tokens], padding included. samples: int64 [samples], the tokens whose logits are wanted; None:
    all, in order. `attention` knows rows, positions and the KV pool. `feed`: see `ops.linear.embed`."""

    tokens: torch.Tensor
    samples: torch.Tensor | None
    attention: Attention
    feed: Feed | None = None


@dataclass(slots=True, frozen=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: LinearWeight
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: LinearWeight
    mlp_norm: torch.Tensor
    gate_up: LinearWeight
    down: LinearWeight


class Decoder:
    """Weights and the forward pass. The KV pool (see `ops.kv.paged_kv`) comes with each step's attention.

    :raises WeightsError: if the weights don't fit `config`.
    """

    def __init__(self, config: ModelConfig, loader: WeightLoader) -> None:
        self.config = config
        self.device = loader.device
        self.dtype = loader.dtype
        self.embedding = loader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [self._load_layer(loader, f"model.layers.{layer}") for layer in range(config.num_layers)]
        self.norm = loader.take("model.norm.weight", config.hidden_size)
        if config.tie_embeddings:
            loader.skip("lm_head.weight")  # some files hold the tied copy too
            self.head = loader.pack_head(self.embedding)
        else:
            self.head = loader.pack_head(loader.take("lm_head.weight", config.vocab_size, config.hidden_size))
        self.kv_scale = loader.take_kv_scales(config.num_layers, config.num_kv_heads)
        self.k_center: torch.Tensor | None = None
        """float32 [layers, kv_heads, head_dim], subtracted from K where the pool is FP8 (`ops.kv.qkv_rope`); set after load."""
        self.rope = self._load_rope(loader)
        loader.finish()

    @property
    def linears(self) -> Iterator[tuple[Role, LinearWeight]]:
        """Every linear, with what it is for."""
        for layer in self.layers:
            yield "qkv", layer.qkv
            yield "output", layer.output
            yield "gate_up", layer.gate_up
            yield "down", layer.down
        yield "head", self.head

    @property
    def layer_parameters(self) -> int:
        """Numbers in the linears of a layer."""
        layer = self.layers[0]
        return sum(weight.parameters for weight in (layer.qkv, layer.output, layer.gate_up, layer.down))

    def kv_form(self, pool: torch.dtype) -> KvForm:
        """In a pool of that dtype: what is 8 bits is scaled, centred and mixed, the rest is as it is."""
        if pool != torch.float8_e4m3fn:
            return KvForm(kv_scale=None, k_center=None, mix=False)
        return KvForm(kv_scale=self.kv_scale, k_center=self.k_center, mix=True)

    def with_linears(self, other: Decoder, places: Collection[LinearPlace]) -> Decoder:
        """This decoder with those linears of `other`, an equal model in another precision; the rest is shared."""
        mixed = copy.copy(self)
        mixed.layers = list(self.layers)
        for layer, role in places:
            weight = getattr(other.layers[layer], role)
            mixed.layers[layer] = replace(mixed.layers[layer], **{role: weight})
        return mixed

    @torch.inference_mode()
    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Writes the step's K and V into the pool. Returns logits [samples, vocab_size] in the model's dtype."""
        return self.logits(self.states(inputs))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """states: [rows, hidden_size], of `states`. Returns logits [rows, vocab_size] in the model's dtype."""
        if not len(states):
            return torch.empty(0, self.config.vocab_size, device=self.device, dtype=self.dtype)
        return linear(states, self.head)

    @torch.inference_mode()
    def states(self, inputs: Inputs) -> torch.Tensor:
        """Writes the step's K and V into the pool. Returns the hidden states behind the last norm, [samples, hidden_size] in
        the model's dtype."""
        eps = self.config.rms_eps
        hidden = embed(inputs.tokens, self.embedding, inputs.feed)
        first, rows = self.layers[0], len(hidden)
        x = add_rms_norm(hidden, None, first.input_norm, eps, quantise=takes_quantised(first.qkv, rows))
        for index, layer in enumerate(self.layers):
            attended = inputs.attention(linear(x, layer.qkv, split=True), layer, index)
            following = self.layers[index + 1] if index + 1 < len(self.layers) else None
            if following is None and inputs.samples is not None:
                if not len(inputs.samples):  # the middle of a prompt: only its K and V were wanted
                    return hidden[:0]
                hidden, attended = hidden.index_select(0, inputs.samples), attended.index_select(0, inputs.samples)
                rows = len(hidden)
            delta = linear(attended, layer.output, split=True)
            x = add_rms_norm(hidden, delta, layer.mlp_norm, eps, quantise=takes_quantised(layer.gate_up, rows))
            middle = gate_up(x, layer.gate_up, quantise=takes_quantised(layer.down, rows))
            delta = linear(middle, layer.down, split=True)
            if following is None:  # the head takes nothing quantised
                states = add_rms_norm(hidden, delta, self.norm, eps, quantise=False)
                assert isinstance(states, torch.Tensor)
                return states
            x = add_rms_norm(hidden, delta, following.input_norm, eps, quantise=takes_quantised(following.qkv, rows))
        raise AssertionError("a decoder without layers")

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _load_layer(self, loader: WeightLoader, prefix: str) -> _Layer:
        config = self.config
        hidden, middle = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def norm(name: str, size: int) -> torch.Tensor:
            return loader.take(f"{prefix}.{name}.weight", size)

        def fused(role: Role, outputs: tuple[int, ...], inputs: int, bias: bool) -> LinearWeight:
            named = {f"{prefix}.{name}": size for name, size in zip(MODULES[role], outputs, strict=True)}
            return loader.take_linear(named, inputs, bias)

        return _Layer(
            input_norm=norm("input_layernorm", hidden),
            qkv=fused("qkv", (q_size, kv_size, kv_size), hidden, config.qkv_bias),
            q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
            output=fused("output", (hidden,), q_size, config.output_bias),
            mlp_norm=norm("post_attention_layernorm", hidden),
            gate_up=fused("gate_up", (middle, middle), hidden, config.mlp_bias),
            down=fused("down", (hidden,), middle, config.mlp_bias),
        )

    def _load_rope(self, loader: WeightLoader) -> RopeTable:
        frequencies, scale = inverse_frequencies(self.config.rope, self.config.head_dim)
        if loader.has(ROPE_FACTORS):  # how GGUF files say Llama 3's scaling
            frequencies = frequencies / loader.take(ROPE_FACTORS, self.config.head_dim // 2, dtype=torch.float32).cpu()
        for layer in range(self.config.num_layers):
            loader.skip(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq")  # old checkpoints hold what we compute
        return RopeTable(frequencies, scale, self.dtype, self.device)
