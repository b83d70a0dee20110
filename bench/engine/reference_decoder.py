"""A decoder's forward pass in reference ops: what a GPU computes in each precision, on a machine without one.

Weights, their loader and quantisers are the engine's own, and each op is the plain-torch reference that tests hold its GPU
kernel to. Numbers are rounded where kernels round them: activations after every op (or to e4m3, with a scale for each row),
K and V to the model's dtype and then to the pool's, for an FP8 pool centred (K) and mixed (Q and K). A card differs in the
order of sums, in what it leaves unrounded when it splits them, and in that it adds up products of e4m3 with fewer bits than
float32 has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from common.models.decoder import Decoder, Layer
from common.ops.kv.forms import KvTarget
from common.ops.kv.qkv_rope_reference import qkv_rope_reference
from common.ops.linear.embed import embed
from common.ops.linear.linear import linear
from common.ops.linear.silu_mul import silu_mul
from common.ops.linear.weight import Role
from common.ops.norm.add_rms_norm_reference import add_rms_norm_reference, quantise_reference
from common.ops.quant.quantise import quantise_rows
from common.ops.tensors import Activation


@dataclass(slots=True, frozen=True)
class ReferenceDecoder:
    """kv: the pool's dtype. quantised: the linears, with FP8 weights, that take quantised activations: on a GPU those of
    enough rows (`linear_device.wants_quantised`)."""

    decoder: Decoder
    kv: torch.dtype
    quantised: frozenset[Role] = frozenset()

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """tokens: int64 [rows, tokens], sequences from their beginnings. Gives each row's [tokens, vocab_size], in the
        model's dtype.

        All K and V are read from the pool, as they are when each token is decoded in a step of its own. (A GPU reads those of
        a fresh prompt before they are rounded to the pool's dtype.)
        """
        decoder, config = self.decoder, self.decoder.config
        rows, length = tokens.shape
        pool = torch.empty(rows, config.num_layers, 2, length, config.num_kv_heads, config.head_dim, dtype=self.kv)
        rope = decoder.rope.table(length)
        hidden, delta = embed(tokens.flatten(), decoder.embedding), None
        for index, layer in enumerate(decoder.layers):
            hidden, x = self._add_norm(hidden, delta, layer.input_norm, "qkv")
            attended = self._attend(linear(x, layer.qkv), layer, index, pool, rope)
            delta = linear(self._given(attended, "output"), layer.output)
            hidden, x = self._add_norm(hidden, delta, layer.mlp_norm, "gate_up")
            middle = silu_mul(
                linear(x, layer.gate_up).float()
            )  # quantised before it is rounded, as after the library's product
            delta = linear(self._given(middle, "down"), layer.down)
        _, normed = add_rms_norm_reference(hidden, delta, decoder.norm, config.rms_eps)
        for row in normed.to(decoder.dtype).split(length):
            yield linear(row, decoder.head)

    def _add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, reader: Role
    ) -> tuple[torch.Tensor, Activation]:
        hidden, normed = add_rms_norm_reference(hidden, delta, weight, self.decoder.config.rms_eps)
        return hidden, quantise_reference(normed) if reader in self.quantised else normed.to(hidden.dtype)

    def _given(self, x: torch.Tensor, reader: Role) -> Activation:
        return quantise_rows(x) if reader in self.quantised else x.to(self.decoder.dtype)

    def _attend(self, qkv: torch.Tensor, norms: Layer, layer: int, pool: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """pool: a block for each row. Returns [rows · tokens, heads · head_dim]."""
        decoder, config, (rows, length) = self.decoder, self.decoder.config, (len(pool), pool.shape[3])
        form = decoder.kv_form(self.kv)
        slots = torch.arange(rows * length)
        query, _, _ = qkv_rope_reference(
            qkv,
            norms.mixer.heads,
            KvTarget(pool, slots, **form),
            layer,
            positions=slots % length,
            rope=rope,
            bias=None,
            dtype=decoder.dtype,
        )
        scales = torch.ones(2, config.num_kv_heads) if form["kv_scale"] is None else form["kv_scale"][layer]
        attended = [
            self._attend_row(of_row, pool[row, layer].float() * scales[:, None, :, None])
            for row, of_row in enumerate(query.split(length))
        ]
        return torch.cat(attended)

    def _attend_row(self, query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """query: [tokens, heads, head_dim]; kv: float32 [2, tokens, kv_heads, head_dim]. Returns [tokens, heads · head_dim].

        As the kernel does it: query and softmax weights in float16 for an 8-bit pool, in the model's dtype for others; sums
        in float32, divided last.
        """
        multiplied = torch.float16 if self.kv == torch.float8_e4m3fn else query.dtype
        group = query.shape[1] // kv.shape[2]
        key, value = kv.repeat_interleave(group, 2).transpose(1, 2)
        scores = query.to(multiplied).float().transpose(0, 1) @ key.mT * query.shape[2] ** -0.5
        places = torch.arange(len(query))
        scores.masked_fill_(places > places[:, None], -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        attended = weights.to(multiplied).float() @ value / weights.sum(-1, keepdim=True)
        return attended.to(query.dtype).transpose(0, 1).flatten(1)
