"""The kernels of the 8-bit engine on a CPU beside their references. Sums are exact: a row has the same bits in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from common.ops.attention.form import AttentionForm
from common.ops.attention.paged_reference import paged_attention_reference
from common.ops.cpu_int8.attention_numba import Step, attention, write_kv
from common.ops.cpu_int8.products_numba import add_and_normalise, gate, multiply, normalise, products_group, quantise
from common.ops.cpu_int8.weights import LARGEST, PAIRS, Int8Weight, linears_of, pack_int8, unpack_int8
from common.ops.kv.rope_reference import apply_rope_reference
from common.ops.linear.gate_up import gate_up
from common.ops.linear.linear import linear
from common.ops.linear.silu_mul_reference import silu_mul_reference
from common.ops.linear.weight import pack_linear
from common.ops.norm.rms_norm_reference import rms_norm_reference

SHAPES = [(960, 576), (576, 1536), (17, 3), (1, 1), (48, 4100), (33, 2049)]


class Activations:
    """Rows quantised one by one, by `kernel(row, rows, *arguments, data, row_scale)`."""

    def __init__(self, kernel: Any, rows: int, size: int, *arguments: object) -> None:
        self.rows, self.size, self.pairs = rows, size, -(-size // (2 * PAIRS)) * PAIRS
        self.data = np.full(rows * self.pairs, -1, np.int32)
        self.scale = np.full(rows, np.nan, np.float32)
        for row in range(rows):
            kernel(row, rows, *arguments, self.data, self.scale)

    @classmethod
    def of(cls, x: torch.Tensor) -> Activations:
        return cls(quantise, len(x), x.shape[1], x.numpy(), x.shape[1])

    def integers(self) -> torch.Tensor:
        """[rows, size], out of groups of [pairs, rows, 2]; what they are padded with is zero."""
        found, row = [], 0
        while row < self.rows:
            first, count = products_group(row, self.rows)
            assert first == row
            group = self.data[row * self.pairs : (row + count) * self.pairs].view(np.int16)
            found.append(group.reshape(self.pairs, count, 2).transpose(1, 0, 2).reshape(count, -1))
            row += count
        integers = torch.from_numpy(np.concatenate(found))
        assert not integers[:, self.size :].any() and int(integers.abs().max()) <= LARGEST
        return integers[:, : self.size]

    def widened(self) -> torch.Tensor:
        return self.integers().double() * torch.from_numpy(self.scale)[:, None].double()

    def assert_close_to(self, expected: torch.Tensor, slack: float = 0.0) -> None:
        steps = torch.from_numpy(self.scale)[:, None]
        assert bool(((self.widened() - expected).abs() <= steps * 0.51 + slack).all())


def product(x: Activations, weight: Int8Weight, outputs: int, parts: int = 1) -> torch.Tensor:
    out = np.full((x.rows, weight.tiles.shape[0] * 16), np.nan, np.float32)
    for part in range(parts):
        multiply(part, parts, linears_of([weight]), 0, x.data, x.scale, x.rows, out)
    return torch.from_numpy(out[:, :outputs])


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_packed_weight_is_the_nearest_of_255_steps(outputs: int, inputs: int) -> None:
    weight = torch.randn(outputs, inputs)
    packed = pack_int8(weight)
    found = unpack_int8(packed, outputs, inputs)
    assert found.shape == weight.shape
    assert bool(((found - weight).abs() <= packed.scale[:outputs, None] * 0.5001).all())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 31])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_the_integers(outputs: int, inputs: int, rows: int, biased: bool) -> None:
    bias = torch.randn(outputs) if biased else torch.zeros(outputs)
    weight = pack_int8(torch.randn(outputs, inputs), bias if biased else None)
    given = torch.randn(rows, inputs) * torch.rand(rows, 1) * 100
    x = Activations.of(given)
    x.assert_close_to(given)
    exact = x.widened() @ unpack_int8(weight, outputs, inputs).double().T
    found = product(x, weight, outputs)
    torch.testing.assert_close(found.double(), exact + bias, rtol=1e-6, atol=1e-5 * float(exact.abs().max()))
    for parts in (2, 7):
        assert torch.equal(product(x, weight, outputs, min(parts, weight.tiles.shape[0])), found)


def test_the_largest_products_do_not_overflow() -> None:
    weight = pack_int8(torch.ones(16, 14_336))
    assert product(Activations.of(torch.ones(1, 14_336)), weight, 16)[0, 0] == pytest.approx(14_336, rel=1e-6)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    for outputs, inputs in ((960, 576), (576, 1536), (32, 5000)):
        weight = pack_int8(torch.randn(outputs, inputs))
        x = torch.randn(70, inputs)
        whole = product(Activations.of(x), weight, outputs)
        for begin, end in ((0, 1), (1, 3), (3, 7), (7, 15), (15, 31), (31, 70)):
            assert torch.equal(product(Activations.of(x[begin:end]), weight, outputs), whole[begin:end])
    both = torch.randn(37, 2 * 576)
    whole, alone = (Activations(gate, len(rows), 576, rows.numpy(), 576) for rows in (both, both[5:6]))
    assert torch.equal(alone.integers()[0], whole.integers()[5]) and alone.scale[0] == whole.scale[5]


@pytest.mark.parametrize("size", [576, 7, 64])
@pytest.mark.parametrize("added", [True, False])
def test_norm_and_gate_are_those_of_the_reference(size: int, added: bool) -> None:
    residual, delta, weight = torch.randn(5, size), torch.randn(5, size + 3), torch.rand(size)
    kept = residual.clone()
    if added:
        found = Activations(add_and_normalise, 5, size, residual.numpy(), delta.numpy(), weight.numpy(), 1e-5)
    else:
        found = Activations(normalise, 5, size, residual.numpy(), weight.numpy(), 1e-5)
    assert torch.equal(residual, kept + delta[:, :size] if added else kept)
    found.assert_close_to(rms_norm_reference(residual, weight, 1e-5), 1e-5)
    both = torch.randn(5, 2 * size) * 6
    Activations(gate, 5, size, both.numpy(), size).assert_close_to(silu_mul_reference(both), 1e-5)


def test_an_int8_weight_is_no_weight_for_ops_of_other_formats() -> None:
    weight = pack_linear(torch.randn(32, 16), format="int8")
    for op in (linear, gate_up):
        with pytest.raises(ValueError, match="compiled step"):
            op(torch.randn(1, 16), weight)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block_tokens"), [(9, 3, 64, 16), (4, 4, 40, 8), (8, 2, 128, 5)])
@pytest.mark.parametrize(("normed", "rotated"), [(False, True), (True, True), (False, False)])
def test_attention_is_that_of_the_reference(
    heads: int, kv_heads: int, size: int, block_tokens: int, normed: bool, rotated: bool
) -> None:
    lengths, starts = [1, 7, 1, 3], [0, 0, 37, 20]
    held = [-(-(start + length) // block_tokens) for start, length in zip(starts, lengths, strict=True)]
    ids = torch.randperm(sum(held) + 3)
    firsts = np.cumsum([0, *held[:-1]])
    pool = torch.randn(sum(held) + 3, 2, 2, block_tokens, kv_heads, size).bfloat16()
    tokens = sum(lengths)
    qkv = torch.randn(tokens + 2, (heads + 2 * kv_heads) * size + 7)
    norms = [torch.rand(size) + 0.5 for _ in range(2)]
    angles = torch.rand(64, size // 2) * 6
    angles[-1] = 0.0
    table = torch.cat((angles.cos(), angles.sin()), -1).contiguous()
    positions = np.concatenate([start + np.arange(length) for start, length in zip(starts, lengths, strict=True)])
    given = qkv[:, :-7].clone().view(-1, heads + 2 * kv_heads, size)
    wanted = np.arange(tokens)
    rows, bits = np.repeat(np.arange(4), lengths), pool.view(torch.int16).numpy()
    step = Step(positions, rows, ids.numpy(), firsts, bits, table.numpy(), np.array([False, rotated]))
    q_norms, k_norms = (norm[None].repeat(2, 1).numpy() if normed else np.empty((2, 0), np.float32) for norm in norms)
    for token in wanted:
        write_kv(token, step, heads, q_norms, k_norms, 1, 1e-5, qkv.numpy())
    outs = [torch.full((tokens, heads * size + 5), torch.nan) for _ in range(2)]
    for splits, out in zip((1, kv_heads), outs, strict=True):
        for part in range(tokens * splits):
            attention(size, heads // kv_heads)(part, splits, step, wanted, 1, size**-0.5, qkv.numpy(), out.numpy())
    found = outs[0][:, :-5]
    assert torch.equal(outs[1][:, :-5], found)
    turned = given[:tokens].clone()
    if normed:
        turned[:, :heads] = rms_norm_reference(turned[:, :heads], norms[0], 1e-5)
        turned[:, heads : heads + kv_heads] = rms_norm_reference(turned[:, heads : heads + kv_heads], norms[1], 1e-5)
    at = torch.from_numpy(positions if rotated else np.full_like(positions, 63))
    cos, sin = angles[at].cos()[:, None], angles[at].sin()[:, None]
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    turned[:, : heads + kv_heads] = apply_rope_reference(turned[:, : heads + kv_heads], cos, sin)

    class Row:
        def __init__(self, index: int) -> None:
            self.first, self.length, self.start = sum(lengths[:index]), lengths[index], starts[index]
            self.blocks = ids[firsts[index] : firsts[index] + held[index]].tolist()

    asked = [Row(index) for index in range(4)]
    for row in asked:
        for i in range(row.length):
            position = row.start + i
            entry = pool[row.blocks[position // block_tokens], 1, :, position % block_tokens].float()
            torch.testing.assert_close(entry[0], turned[row.first + i, heads : heads + kv_heads], rtol=1e-2, atol=1e-2)
            assert torch.equal(entry[1].bfloat16(), given[row.first + i, heads + kv_heads :].bfloat16())
    expected = paged_attention_reference(turned[:, :heads], pool.float(), 1, asked, AttentionForm(size**-0.5))
    torch.testing.assert_close(found.view(expected.shape), expected, rtol=1e-3, atol=2e-5)
