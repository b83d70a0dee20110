"""The kernel for few rows of weights in groups beside its reference, on a GPU with programmatic dependent launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from common.ops.linear import device as linear_device
from common.ops.linear.candidates import Op
from common.ops.linear.reference import linear_grouped_reference
from common.ops.linear.streaming import streaming_candidates
from common.ops.quant.group_layout import Code
from tests.ops.test_unpacking_gpu import random_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)), reason="needs a Hopper GPU or later"
    ),
]
MAX_ERROR = 0.03
"""In standard deviations of the results, of which bf16's rounding is the most."""


@pytest.mark.parametrize("op", ["linear", "split", "wide", "gated"])
@pytest.mark.parametrize(
    ("code", "group", "offsets"), [("int4", 128, True), ("int4", 128, False), ("int4", 64, True), ("nf4", 64, False)]
)
def test_every_candidate(code: Code, group: int, offsets: bool, op: Op) -> None:
    """Tiles that fill no program, splits of unequal lengths, one row to sixteen."""
    torch.manual_seed(0)
    for size, depth in ((9504, 1792), (2080, 4096)):
        weight = random_weight(code, group, size, depth, offsets=offsets)
        assert weight.grouped is not None
        for rows in (1, 5, 8, 9, 16):
            x = torch.randn(rows, depth, device="cuda").bfloat16()
            meant = linear_grouped_reference(x, weight.grouped, weight.bias, torch.float32)
            if op == "gated":
                gate, up = meant.chunk(2, 1)
                meant = torch.nn.functional.silu(gate) * up
            shape = linear_device.shape_of(op, weight)
            found = [one for sms in (132, 60, 32) for one in streaming_candidates(shape, rows, sms)]
            assert found
            for chosen in found:
                result = linear_device.run(op, x, weight, chosen)
                result = (result.sum(0) if result.ndim == 3 else result).float()
                assert ((result - meant).abs() / (meant.abs() + meant.std())).max() < MAX_ERROR, chosen


@pytest.mark.parametrize(("rows", "in_bytes"), [(16, False), (8, False), (4, True)])
def test_activations_of_other_rows_change_nothing(rows: int, in_bytes: bool) -> None:
    """A row's results are the same, bit for bit, alone and beside others that are not numbers."""
    torch.manual_seed(0)
    weight = random_weight("int4", 128, 9504, 1792, offsets=True)
    chosen = streaming_candidates(linear_device.shape_of("linear", weight), rows, 60)[0]
    assert chosen.in_bytes == in_bytes
    x = torch.full((rows, 1792), float("nan"), device="cuda", dtype=torch.bfloat16)
    x[3] = torch.randn(1792, device="cuda")
    together = linear_device.run("linear", x, weight, chosen)
    assert torch.equal(together[3], linear_device.run("linear", x[3:4], weight, chosen)[0])
    assert together[:3].isnan().all()


@pytest.mark.parametrize("group", [64, 128])
def test_activations_of_any_size_are_bytes(group: int) -> None:
    """Groups that are zero, tiny, huge or of very different numbers; an infinite one spoils its row alone."""
    torch.manual_seed(0)
    weight = random_weight("int4", group, 2080, 4096, offsets=True)
    assert weight.grouped is not None
    x = torch.randn(4, 4096, device="cuda").bfloat16()
    x[0, :1024] = 0
    x[0, 1024:2048] *= 1e-30
    x[1] *= 1e30
    x[2, ::97] *= 2000
    x[3, 17] = float("inf")
    meant = linear_grouped_reference(x, weight.grouped, weight.bias, torch.float32)
    chosen = next(one for one in streaming_candidates(linear_device.shape_of("wide", weight), 4, 60) if one.in_bytes)
    result = linear_device.run("wide", x, weight, chosen)
    assert ((result - meant).abs() / (meant.abs() + meant.std(1, keepdim=True)))[:3].max() < MAX_ERROR / 10
    assert not result[3].isfinite().any()
