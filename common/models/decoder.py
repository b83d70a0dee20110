"""The decoder that Llama and Qwen3 share: pre-norm, grouped-query attention with RoPE, SwiGLU.

What differs between models (QK norm, biases, head size, rope scaling, tied embeddings) is configuration. Q, K and V are one
matrix here, and so are gate and up. A step's tokens are flat: rows of all sequences, one after the other, go through the
linears together; only attention knows where a row begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.models.config import ModelConfig
from common.models.rope import RopeTable, inverse_frequencies
from common.models.weights.base import WeightLoader
from common.ops.linear import LinearWeight, linear, pack_linear
from common.ops.paged_attention import AttentionPlan, paged_attention
from common.ops.paged_kv import SlotMapping, write_kv
from common.ops.rms_norm import rms_norm
from common.ops.rope import apply_rope
from common.ops.silu_mul import silu_mul

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(slots=True)
class Inputs:
    """One step. tokens, positions: int64 [tokens], padding included; `highest` is the largest position.

    samples: int64 [samples], the tokens whose logits are wanted.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    highest: int
    slots: SlotMapping
    attention: AttentionPlan
    samples: torch.Tensor


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
    """Weights and the forward pass. The KV pool (see `ops.paged_kv`) comes with each call.

    :raises WeightsError: if the weights don't fit `config`.
    """

    def __init__(self, config: ModelConfig, loader: WeightLoader, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.dtype = loader.dtype
        self._scale = config.head_dim**-0.5
        self.embedding = loader.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size).to(device)
        self.layers = [self._load_layer(loader, f"model.layers.{layer}") for layer in range(config.num_layers)]
        self.norm = loader.take("model.norm.weight", config.hidden_size).to(device)
        if config.tie_embeddings:
            loader.skip("lm_head.weight")  # some files hold the tied copy too
            self.head = pack_linear(self.embedding)
        else:
            self.head = pack_linear(loader.take("lm_head.weight", config.vocab_size, config.hidden_size).to(device))
        self._rope = self._load_rope(loader)
        loader.finish()

    @torch.inference_mode()
    def forward(self, inputs: Inputs, pool: torch.Tensor) -> torch.Tensor:
        """Writes the step's K and V into `pool`. Returns float32 logits [samples, vocab_size]."""
        config = self.config
        kv_heads, heads = config.num_kv_heads, config.num_heads
        cos, sin = self._rope.rows(inputs.positions, inputs.highest)
        x = F.embedding(inputs.tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = linear(rms_norm(x, layer.input_norm, config.rms_eps), layer.qkv).view(len(x), -1, config.head_dim)
            query, key = self._positioned(qkv, layer, cos, sin)
            write_kv(pool, index, key, qkv[:, heads + kv_heads :], inputs.slots)
            last = index == len(self.layers) - 1
            if last and not len(inputs.samples):
                break  # the middle of a prompt: only its K and V were wanted
            attended = paged_attention(query, pool, index, inputs.attention, self._scale).view(len(x), -1)
            if last:
                x, attended = x.index_select(0, inputs.samples), attended.index_select(0, inputs.samples)
            x = linear(attended, layer.output).add_(x)
            gate_up = linear(rms_norm(x, layer.mlp_norm, config.rms_eps), layer.gate_up)
            x = linear(silu_mul(gate_up), layer.down).add_(x)
        if not len(inputs.samples):
            return torch.empty(0, config.vocab_size, device=self.device)
        return linear(rms_norm(x, self.norm, config.rms_eps), self.head).float()

    def _positioned(
        self, qkv: torch.Tensor, layer: _Layer, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Q [tokens, heads, head_dim] and K [tokens, kv_heads, head_dim], normalised (Qwen3) and rotated."""
        heads, end = self.config.num_heads, self.config.num_heads + self.config.num_kv_heads
        if layer.q_norm is None or layer.k_norm is None:
            rotated = apply_rope(qkv[:, :end], cos, sin)
            return rotated[:, :heads], rotated[:, heads:]
        query = rms_norm(qkv[:, :heads], layer.q_norm, self.config.rms_eps)
        key = rms_norm(qkv[:, heads:end], layer.k_norm, self.config.rms_eps)
        return apply_rope(query, cos, sin), apply_rope(key, cos, sin)

    # ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _load_layer(self, loader: WeightLoader, prefix: str) -> _Layer:
        config, device = self.config, self.device
        hidden, middle = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def norm(name: str, size: int) -> torch.Tensor:
            return loader.take(f"{prefix}.{name}.weight", size).to(device)

        def fused(outputs: dict[str, int], inputs: int, bias: bool) -> LinearWeight:
            weights = [loader.take(f"{prefix}.{name}.weight", size, inputs) for name, size in outputs.items()]
            biases = [loader.take(f"{prefix}.{name}.bias", size) for name, size in outputs.items()] if bias else []
            weight = torch.cat(weights) if len(weights) > 1 else weights[0]
            return pack_linear(weight.to(device), torch.cat(biases).to(device) if biases else None)

        qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        return _Layer(
            input_norm=norm("input_layernorm", hidden),
            qkv=fused(qkv, hidden, config.qkv_bias),
            q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
            output=fused({"self_attn.o_proj": hidden}, q_size, config.output_bias),
            mlp_norm=norm("post_attention_layernorm", hidden),
            gate_up=fused({"mlp.gate_proj": middle, "mlp.up_proj": middle}, hidden, config.mlp_bias),
            down=fused({"mlp.down_proj": hidden}, middle, config.mlp_bias),
        )

    def _load_rope(self, loader: WeightLoader) -> RopeTable:
        frequencies, scale = inverse_frequencies(self.config.rope, self.config.head_dim)
        if loader.has(ROPE_FACTORS):  # how GGUF files say Llama 3's scaling
            frequencies = frequencies / loader.take(ROPE_FACTORS, self.config.head_dim // 2).float()
        for layer in range(self.config.num_layers):
            loader.skip(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq")  # old checkpoints hold what we compute
        return RopeTable(frequencies, scale, self.dtype, self.device)
