"""SwiGLU's two linears and its gate, fused in any way, equal the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.ops.backend import interpreted
from common.ops.linear import device as linear_device
from common.ops.linear.candidates import Candidate
from common.ops.linear.gate_up import gate_up
from common.ops.linear.gate_up_reference import gate_up_reference
from common.ops.linear.gate_up_triton import rescale_triton, silu_mul_triton
from common.ops.linear.weight import LinearWeight, linear_from_fp8, pack_linear
from common.ops.quant.quantise import quantise_rows, quantise_weight
from common.ops.quant.quantise_reference import dequantise_weight_reference
from common.ops.tensors import Activation, Quantised


@pytest.fixture(autouse=True)
def _no_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PENSTOCK_KERNEL_CACHE", str(tmp_path))
    linear_device.forget_choices()
    yield
    linear_device.forget_choices()


def _weight(size: int, depth: int, kind: str, biased: bool) -> LinearWeight:
    weight = (torch.randn(2 * size, depth) * depth**-0.5).bfloat16()
    bias = torch.randn(2 * size).bfloat16() if biased else None
    if kind == "blocks":
        return linear_from_fp8(*quantise_weight(weight, 128), bias)
    return pack_linear(weight, bias, format="fp8" if kind == "channel" else "plain")


def _expected(x: Activation, weight: LinearWeight) -> torch.Tensor:
    wide = x.data.float() * x.scale[:, None] if isinstance(x, Quantised) else x.float()
    matrix = weight.data.float() if weight.scale is None else dequantise_weight_reference(weight.data, weight.scale)
    return gate_up_reference(wide, matrix, None if weight.bias is None else weight.bias.float())


FUSED = [
    (Candidate("dot", block_n=64, block_m=16, block_k=64), 5),
    (Candidate("gemv", block_n=4, block_m=2, block_k=256, warps=8), 2),
    (Candidate("persistent", block_n=128, block_m=128, block_k=64, warps=8), 130),
    (Candidate("library"), 6),
]


@pytest.mark.parametrize("kind", ["plain", "channel", "blocks"])
@pytest.mark.parametrize(("chosen", "rows"), FUSED, ids=[candidate.kind for candidate, _ in FUSED])
def test_fused_kernels_equal_the_reference(kind: str, chosen: Candidate, rows: int) -> None:
    if chosen.kind == "gemv" and kind == "blocks":
        pytest.skip("no such kernel")
    size = 192 if kind == "blocks" else 77
    with interpreted():
        weight = _weight(size, 208, kind, biased=kind != "channel")
        x = torch.randn(rows, 208).bfloat16()
        for given in (x, quantise_rows(x)) if kind != "plain" and chosen.kind == "dot" else (x,):
            if chosen.kind == "persistent" and kind != "plain":
                given = quantise_rows(x)
            y = linear_device.run("gated", given, weight, chosen)
            torch.testing.assert_close(y.float(), _expected(given, weight), atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", ["plain", "channel", "blocks"])
@pytest.mark.parametrize("rows", [1, 18])
@pytest.mark.parametrize("quantise", [False, True])
def test_the_op_takes_what_comes(kind: str, rows: int, quantise: bool) -> None:
    with interpreted():
        weight = _weight(96, 144, kind, biased=True)
        x = torch.randn(rows, 144).bfloat16()
        for given in (x, quantise_rows(x)) if kind != "plain" else (x,):
            y = gate_up(given, weight, quantise=quantise)
            assert isinstance(y, Quantised) == quantise
            wide = y.data.float() * y.scale[:, None] if isinstance(y, Quantised) else y.float()
            torch.testing.assert_close(wide, _expected(given, weight), atol=0.3, rtol=0.1)
        assert not len(gate_up(x[:0], weight))


def test_on_a_cpu_it_is_linear_then_silu_mul() -> None:
    weight = _weight(48, 64, "plain", biased=True)
    plain = (torch.randn(96, 64) * 0.1).bfloat16()
    weight = pack_linear(plain)
    x = torch.randn(3, 64).bfloat16()
    torch.testing.assert_close(
        gate_up(x, weight).float(), gate_up_reference(x.float(), plain.float(), None), atol=2e-2, rtol=2e-2
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_on_a_cpu_a_row_has_the_same_bits_in_any_company(activation: Any) -> None:
    """Of so many rows that threads share them."""
    weight, threads = pack_linear(torch.randn(2 * 2048, 64)), torch.get_num_threads()
    x = torch.randn(50, 64)
    try:
        torch.set_num_threads(3)
        together = gate_up(x, weight, activation=activation)
        for row in range(50):
            assert torch.equal(gate_up(x[row : row + 1], weight, activation=activation)[0], together[row])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("size", [64, 2500, 17000])
def test_scales_and_bias_left_by_the_library(size: int) -> None:
    rows = 3
    y, bias = torch.randn(rows, 2 * size).bfloat16(), torch.randn(2 * size).bfloat16()
    x_scale, w_scale = torch.rand(rows) + 0.1, torch.rand(2 * size) + 0.1
    scaled = y.float() * x_scale[:, None] * w_scale + bias.float()
    gate, up = scaled.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    with interpreted():
        found = silu_mul_triton(y, torch.bfloat16, scales=(x_scale, w_scale), bias=bias)
        small = silu_mul_triton(y, torch.bfloat16, scales=(x_scale, w_scale), bias=bias, quantise=True)
        linear = rescale_triton(y.clone(), x_scale, w_scale, bias, torch.bfloat16)
    assert isinstance(found, torch.Tensor)
    assert isinstance(small, Quantised)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(small.data.float() * small.scale[:, None], expected, atol=2e-2, rtol=0.07)
    torch.testing.assert_close(linear.float(), scaled, atol=2e-2, rtol=1e-2)


def test_a_gate_that_ends_inside_a_block_of_scales_is_right() -> None:
    with interpreted():
        weight = _weight(100, 130, "blocks", biased=False)
        x = torch.randn(2, 130).bfloat16()
        for given in (x, quantise_rows(x)):
            torch.testing.assert_close(gate_up(given, weight).float(), _expected(given, weight), atol=3e-2, rtol=3e-2)
