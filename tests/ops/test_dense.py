"""Linears, norms, rotation and gate equal their references, and a row's bits don't depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from common.ops.kv.rope import apply_rope
from common.ops.kv.rope_reference import apply_rope_reference
from common.ops.linear.linear import linear
from common.ops.linear.reference import linear_reference
from common.ops.linear.silu_mul import silu_mul
from common.ops.linear.silu_mul_reference import silu_mul_reference
from common.ops.linear.weight import pack_linear
from common.ops.norm.rms_norm import rms_norm
from common.ops.norm.rms_norm_reference import rms_norm_reference

ROWS = [1, 2, 3, 5, 8, 17, 32, 33, 100, 257]
SHAPES = [(960, 576), (576, 1536), (128, 64), (77, 100), (3, 1), (512, 4096)]
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_equals_its_reference(dtype: torch.dtype, out_features: int, in_features: int, biased: bool) -> None:
    weight = (torch.randn(out_features, in_features) * in_features**-0.5).to(dtype)
    bias = torch.randn(out_features).to(dtype) if biased else None
    packed = pack_linear(weight, bias)
    for rows in ROWS:
        x = torch.randn(rows, in_features).to(dtype)
        expected = linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(linear(x, packed).double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        wide = linear(x, packed, wide=True)  # nothing is rounded to bfloat16
        torch.testing.assert_close(wide.double(), expected, atol=1e-4, rtol=1e-4)
        assert wide.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_row_of_a_linear_has_the_same_bits_in_every_batch(
    out_features: int, in_features: int, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    weight = pack_linear(torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype))
    x = torch.randn(600, in_features).to(dtype)
    whole = linear(x, weight)
    for count in (1, 2, 5):
        threads(count)
        for rows in ROWS:
            assert torch.equal(linear(x[-rows:], weight), whole[-rows:]), (rows, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 100, 576, 4096])
def test_rms_norm(dtype: torch.dtype, size: int, threads: Callable[[int], None]) -> None:
    x, weight = (torch.randn(300, size) * 3).to(dtype), torch.randn(size).to(dtype)
    whole = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(whole, rms_norm_reference(x, weight, 1e-5), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    for count in (1, 2, 5, 16):
        threads(count)
        for rows in ROWS:
            assert torch.equal(rms_norm(x[-rows:], weight, 1e-5), whole[-rows:])


@pytest.mark.parametrize(("heads", "dim"), [(12, 64), (1, 2), (6, 40)])
def test_rope(heads: int, dim: int) -> None:
    angles = torch.randn(50, 1, dim // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    x = torch.randn(50, heads + 1, dim)[:, 1:]  # a view, as the decoder passes
    torch.testing.assert_close(apply_rope(x, cos, sin), apply_rope_reference(x, cos, sin))
    assert torch.equal(apply_rope(x[7:8], cos[7:8], sin[7:8]), apply_rope(x, cos, sin)[7:8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 128, 1536])
def test_silu_mul(dtype: torch.dtype, size: int, threads: Callable[[int], None]) -> None:
    gate_up = torch.randn(300, 2 * size).to(dtype)
    kept = gate_up.clone()
    whole = silu_mul(gate_up)
    assert torch.equal(gate_up, kept)
    torch.testing.assert_close(whole, silu_mul_reference(gate_up), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    for count in (1, 2, 5, 16):
        threads(count)
        for rows in ROWS:
            assert torch.equal(silu_mul(gate_up[-rows:]), whole[-rows:])


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight = pack_linear(torch.randn(8, 4))
    with pytest.raises(ValueError, match="linear takes"):
        linear(torch.randn(2, 5), weight)
    with pytest.raises(ValueError, match="linear weight"):
        pack_linear(torch.randn(8, 4), torch.randn(4))
    with pytest.raises(ValueError, match="linear weights are"):
        pack_linear(torch.randn(8, 4).double())
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(torch.randn(2, 5), torch.randn(4), 1e-5)
    with pytest.raises(ValueError, match="rope"):
        apply_rope(torch.randn(2, 3, 4), torch.randn(2, 4), torch.randn(2, 4))
    with pytest.raises(ValueError, match="silu_mul"):
        silu_mul(torch.randn(2, 5))
