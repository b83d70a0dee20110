"""Attention without a pool, for measurements of a model on text: rows of equal length from their beginnings, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from common.models.attention import queries_and_keys
from common.models.blocks.attention import AttentionBlock
from common.models.decoder import Decoder
from common.models.spec import RopeSpec
from common.ops.attention.form import AttentionForm
from common.ops.kv.hadamard_reference import hadamard
from common.ops.quant.quantise_reference import E4M3_MAX

CENTERED_POSITIONS = 2048


@dataclass(slots=True)
class Causal:
    """An `Attention`; a step's tokens are rows of `length` tokens each.

    keys: float32 [layers, kv_heads, head_dim], to which K before rotation is added of layers that can be centred; or None.
    center: as `ops.kv.forms` takes it: K and V are what an FP8 pool would make of them; None: as they are.
    """

    decoder: Decoder
    length: int
    keys: torch.Tensor | None = None
    center: torch.Tensor | None = None
    positions: torch.Tensor = field(init=False)
    rotations: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.positions = torch.arange(self.length, device=self.decoder.device)
        self.rotations = {rope: table.rows(self.positions, self.length - 1) for rope, table in self.decoder.ropes.items()}

    def __call__(self, qkv: torch.Tensor, block: AttentionBlock, layer: int) -> torch.Tensor:
        dtype, spec = self.decoder.dtype, block.spec
        summed = (qkv if qkv.ndim == 2 else qkv.sum(0)).to(dtype)
        rows = len(summed) // self.length
        positions = self.positions.repeat(rows)
        rotations = {rope: (cos.repeat(rows, 1, 1), sin.repeat(rows, 1, 1)) for rope, (cos, sin) in self.rotations.items()}
        query, key, value, unrotated = queries_and_keys(summed, block, rotations, positions)
        if self.keys is not None and can_center(block):
            self.keys[layer] += unrotated.float().sum(0)
        if self.center is not None:
            mix = hadamard(spec.head_dim).to(query.device)
            query = (query.float() @ mix).to(dtype)
            key = (key.float() - self.center[layer] if can_center(block) else key.float()) @ mix
            key, value = (self._stored(x, layer, index) for index, x in enumerate((key, value)))
        query, key, value = (x.reshape(rows, self.length, -1, spec.head_dim).transpose(1, 2) for x in (query, key, value))
        return _attended(query, key, value, block.form).transpose(1, 2).reshape(len(summed), -1)

    def _stored(self, x: torch.Tensor, layer: int, index: int) -> torch.Tensor:
        """K (0) or V (1) as it comes back from an FP8 pool. x: [tokens, kv_heads, head_dim]."""
        scales = self.decoder.kv_scale
        scale = torch.ones((), device=x.device) if scales is None else scales[layer, index][:, None]
        dtype = self.decoder.dtype
        in_8_bits = (x.to(dtype).float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return (in_8_bits.float() * scale).to(dtype)


def can_center(block: AttentionBlock) -> bool:
    """Tell whether a layer's keys are centred: its softmax must not see it, and what turns keys be known before they are."""
    rope = block.spec.rope
    plainly_rotated = rope is None or not (rope.dims or rope.interleaved)
    return plainly_rotated and not block.heads.without_weights and not block.form.kind.is_adjusted


def centered(mean: torch.Tensor, decoder: Decoder) -> torch.Tensor:
    """mean: of K before rotation, float32 [layers, kv_heads, head_dim]. Returns its mean after rotation to positions from 0 on,
    rounded so that machines that add up differently agree on nearly all of it."""
    positions = min(CENTERED_POSITIONS, decoder.config.max_context)
    tables = {rope: table.table(positions).mean(0) for rope, table in decoder.ropes.items()}
    rotated = mean.clone()
    for index, layer in enumerate(decoder.layers):
        rope = layer.mixer.spec.rope
        if rope is not None and can_center(layer.mixer):
            cos, sin = tables[rope].chunk(2)
            first, second = mean[index].chunk(2, -1)
            rotated[index] = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return rotated.bfloat16().float()


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: AttentionForm) -> torch.Tensor:
    """query: [rows, heads, tokens, head_dim]; key, value: [rows, kv_heads, tokens, head_dim]. Returns [rows, heads, tokens,
    head_dim]."""
    if form.is_plain:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=form.scale, enable_gqa=grouped)
    places = torch.arange(query.shape[2], device=query.device)
    firsts = torch.tensor([form.first_key(place) for place in range(len(places))], device=query.device)
    hidden = (places > places[:, None]) | (places < firsts[:, None])
    out = torch.empty_like(query)
    for row in range(len(query)):
        keys, values = (x[row].float().repeat_interleave(query.shape[1] // key.shape[1], 0) for x in (key, value))
        scores = query[row].float() @ keys.mT * form.scale
        if form.soft_cap:
            scores = scores.div_(form.soft_cap).tanh_().mul_(form.soft_cap)
        scores.masked_fill_(hidden, -torch.inf)
        if form.sinks is not None:
            scores = torch.cat((scores, form.sinks[:, None, None].expand(-1, len(places), 1)), -1)
        out[row] = (scores.softmax(-1)[..., : len(places)] @ values).to(out.dtype)
    return out
