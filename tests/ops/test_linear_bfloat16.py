"""A row's bits in bfloat16 don't depend on the rows beside it, nor on the threads, whether or not oneDNN has kernels for it."""

from __future__ import annotations

import pytest
import torch

from common.ops.linear import linear, pack_linear
from common.ops.linear_cpu import can_pack

ROWS = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 32, 33, 64, 100, 256, 257]
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (4099, 576), (77, 100), (512, 4096), (4096, 14336 // 4)]


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_has_the_same_bits_in_every_batch(out_features: int, in_features: int, biased: bool) -> None:
    bias = torch.randn(out_features).bfloat16() if biased else None
    weight = pack_linear((torch.randn(out_features, in_features) * in_features**-0.5).bfloat16(), bias)
    assert weight.format == ("onednn" if can_pack(torch.bfloat16) else "plain")
    x = torch.randn(600, in_features).bfloat16()
    whole = linear(x, weight)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in ROWS:
                assert torch.equal(linear(x[-rows:], weight), whole[-rows:]), (rows, count)
    finally:
        torch.set_num_threads(threads)
