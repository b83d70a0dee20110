"""Quantised numbers are the nearest that 8-bit floats have, row by row and block by block."""

from __future__ import annotations

import pytest
import torch

from common.ops.backend import interpreted
from common.ops.quant.quantise import quantise_rows, quantise_weight
from common.ops.quant.quantise_reference import dequantise_weight_reference, quantise_blocks_reference, quantise_rows_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 577), (5, 4096), (2, 9001), (2, 17001)])
def test_rows_equal_their_reference(dtype: torch.dtype, rows: int, size: int) -> None:
    x = (torch.randn(rows, size) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
    expected = quantise_rows_reference(x)
    with interpreted():
        found = quantise_rows(x)
    torch.testing.assert_close(found.scale, expected.scale)
    assert found.data.float().abs().amax() == 448
    # the same number, or its neighbour where a quotient fell between two
    torch.testing.assert_close(found.data.float(), expected.data.float(), atol=2**-9, rtol=0.14)
    assert (found.data.float() == expected.data.float()).float().mean() > 0.99


@pytest.mark.parametrize("device", ["cpu", "kernel"])
def test_a_row_of_zeros_stays_zero(device: str) -> None:
    x = torch.zeros(2, 40)
    x[1, 3] = -1e-3
    if device == "kernel":
        with interpreted():
            data, scale = quantise_rows(x)
    else:
        data, scale = quantise_rows(x)
    assert (scale > 0).all()
    assert not data[0].float().any()
    assert data[1, 3].float() * scale[1] == pytest.approx(-1e-3)


@pytest.mark.parametrize("block", [None, 128])
def test_weights_come_back_within_half_a_step(block: int | None) -> None:
    weight = torch.randn(300, 200) * torch.logspace(-2, 2, 300)[:, None]
    data, scale = quantise_weight(weight, block)
    assert scale.shape == ((300,) if block is None else (3, 2))
    back = dequantise_weight_reference(data, scale)
    # half a unit of three bits of mantissa, and of the smallest subnormal
    smallest = scale.max() * 2**-10 if block else (scale * 2**-10)[:, None]
    assert ((back - weight).abs() <= weight.abs() * 2**-4 * 1.001 + smallest).all()


def test_large_weights_are_quantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.ops.quant.quantise._CHUNK_ELEMENTS", 128 * 150)
    weight = torch.randn(500, 150)
    data, scale = quantise_weight(weight, 128)
    whole, whole_scale = quantise_blocks_reference(weight, 128)
    assert torch.equal(data.view(torch.uint8), whole.view(torch.uint8))
    assert torch.equal(scale, whole_scale)


def test_other_shapes_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="floating"):
        quantise_rows(torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="floating"):
        quantise_weight(torch.zeros(3), 128)
