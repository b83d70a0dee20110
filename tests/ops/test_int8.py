"""8-bit linears on a CPU: exact sums, so that a row has the same bits in any company; and attention beside its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.ops.add_rms_norm import add_rms_norm
from common.ops.attention_numba import attention
from common.ops.gate_up import gate_up
from common.ops.int8_cpu import LARGEST, pack_int8, quantise_int, unpack_int8
from common.ops.linear import linear, pack_linear, takes_quantised
from common.ops.paged_attention_reference import paged_attention_reference
from common.ops.rms_norm_reference import rms_norm_reference
from common.ops.rope_reference import apply_rope_reference
from common.ops.silu_mul_reference import silu_mul_reference
from common.ops.tensors import Quantised

SHAPES = [(960, 576), (576, 1536), (17, 3), (1, 1), (48, 4100), (33, 2049)]


def widened(quantised: Quantised, size: int) -> torch.Tensor:
    return quantised.data[:, :size].double() * quantised.scale[:, None].double()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_packed_weight_is_the_nearest_of_255_steps(outputs: int, inputs: int) -> None:
    weight = torch.randn(outputs, inputs)
    tiles, scale = pack_int8(weight)
    found = unpack_int8(tiles, scale, inputs)
    assert found.shape == weight.shape
    assert bool(((found - weight).abs() <= scale[:, None] * 0.5001).all())


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 31])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_the_integers(outputs: int, inputs: int, rows: int) -> None:
    weight, bias = pack_linear(torch.randn(outputs, inputs), torch.randn(outputs), format="int8"), None
    x = torch.randn(rows, inputs) * torch.rand(rows, 1) * 100
    quantised = quantise_int(x)
    assert int(quantised.data.abs().max()) <= LARGEST
    assert bool(((widened(quantised, inputs) - x).abs() <= quantised.scale[:, None] * 0.502).all())
    exact = widened(quantised, inputs) @ unpack_int8(weight.data, weight.scale, inputs).double().T  # pyright: ignore[reportArgumentType]
    expected = exact + (0 if weight.bias is None else weight.bias.double())
    found = linear(x, weight)
    assert bias is None and found.shape == (rows, outputs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5 * float(exact.abs().max()))


def test_the_largest_products_do_not_overflow() -> None:
    weight = pack_linear(torch.ones(16, 14_336), format="int8")
    assert linear(torch.ones(1, 14_336), weight)[0, 0] == pytest.approx(14_336, rel=1e-6)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    weights = [pack_linear(torch.randn(n, k), format="int8") for n, k in ((960, 576), (576, 1536))]
    gate = pack_linear(torch.randn(3072, 576) / 24, format="int8")
    for weight in weights:
        x = torch.randn(70, weight.in_features)
        whole = linear(x, weight)
        for begin, end in ((0, 1), (1, 3), (3, 7), (7, 15), (15, 31), (31, 70)):
            assert torch.equal(linear(x[begin:end], weight), whole[begin:end])
    x = torch.randn(37, 576)
    whole = gate_up(x, gate, quantise=True)
    alone = gate_up(x[5:6], gate, quantise=True)
    assert isinstance(whole, Quantised) and isinstance(alone, Quantised)
    assert torch.equal(alone.data[0], whole.data[5]) and alone.scale[0] == whole.scale[5]


@pytest.mark.parametrize("size", [576, 7, 64])
@pytest.mark.parametrize("added", [True, False])
def test_norm_and_gate_are_those_of_the_reference(size: int, added: bool) -> None:
    residual, delta, weight = torch.randn(5, size), torch.randn(5, size), torch.rand(size)
    kept = residual.clone()
    found = add_rms_norm(residual, delta if added else None, weight, 1e-5, quantise=True)
    assert isinstance(found, Quantised)
    assert torch.equal(residual, kept + delta if added else kept)
    expected = rms_norm_reference(residual, weight, 1e-5)
    assert bool(((widened(found, size) - expected).abs() <= found.scale[:, None] * 0.51 + 1e-5).all())
    both = torch.randn(5, 2 * size) * 6
    up = pack_linear(torch.eye(2 * size), format="int8")
    gated = gate_up(both, up, quantise=True)
    assert isinstance(gated, Quantised) and takes_quantised(up, 5)
    expected = silu_mul_reference(linear(both, up))
    assert bool(((widened(gated, size) - expected).abs() <= gated.scale[:, None] * 0.51 + 1e-5).all())


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block_tokens"), [(9, 3, 64, 16), (4, 4, 40, 8), (8, 2, 128, 5)])
@pytest.mark.parametrize("normed", [False, True])
def test_attention_is_that_of_the_reference(heads: int, kv_heads: int, size: int, block_tokens: int, normed: bool) -> None:
    lengths, starts = [1, 7, 1, 3], [0, 0, 37, 20]
    held = [-(-(start + length) // block_tokens) for start, length in zip(starts, lengths, strict=True)]
    ids = torch.randperm(sum(held) + 3)
    firsts = np.cumsum([0, *held[:-1]])
    pool = torch.randn(sum(held) + 3, 2, 2, block_tokens, kv_heads, size).bfloat16()
    tokens = sum(lengths)
    qkv = torch.randn(tokens + 2, heads + 2 * kv_heads, size)
    norms = [torch.rand(size) + 0.5 for _ in range(2)]
    angles = torch.rand(64, size // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).contiguous()
    positions = np.concatenate([start + np.arange(length) for start, length in zip(starts, lengths, strict=True)])
    given = qkv.clone()
    out = torch.full((tokens, heads, size), torch.nan)
    nothing = np.empty(0, np.float32)
    attention(size, heads // kv_heads)(
        qkv.numpy(),
        heads,
        norms[0].numpy() if normed else nothing,
        norms[1].numpy() if normed else nothing,
        1e-5,
        table.numpy(),
        pool.view(torch.int16).numpy(),
        1,
        positions,
        np.repeat(np.arange(4), lengths),
        ids.numpy(),
        firsts,
        size**-0.5,
        out.numpy(),
    )
    turned = given[:tokens].clone()
    if normed:
        turned[:, :heads] = rms_norm_reference(turned[:, :heads], norms[0], 1e-5)
        turned[:, heads : heads + kv_heads] = rms_norm_reference(turned[:, heads : heads + kv_heads], norms[1], 1e-5)
    at = torch.from_numpy(positions)
    cos, sin = angles[at].cos()[:, None], angles[at].sin()[:, None]
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    turned[:, : heads + kv_heads] = apply_rope_reference(turned[:, : heads + kv_heads], cos, sin)

    class Row:
        def __init__(self, index: int) -> None:
            self.first, self.length, self.start = sum(lengths[:index]), lengths[index], starts[index]
            self.blocks = ids[firsts[index] : firsts[index] + held[index]].tolist()

    rows = [Row(index) for index in range(4)]
    for row in rows:
        for i in range(row.length):
            position = row.start + i
            entry = pool[row.blocks[position // block_tokens], 1, :, position % block_tokens].float()
            torch.testing.assert_close(entry[0], turned[row.first + i, heads : heads + kv_heads], rtol=1e-2, atol=1e-2)
            assert torch.equal(entry[1].bfloat16(), given[row.first + i, heads + kv_heads :].bfloat16())
    expected = paged_attention_reference(turned[:, :heads], pool.float(), 1, rows, size**-0.5)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=2e-5)
