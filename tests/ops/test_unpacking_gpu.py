"""The kernel that unpacks in warps of its own beside its reference, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from common.ops.linear import device as linear_device
from common.ops.linear.candidates import Candidate, Op
from common.ops.linear.reference import linear_grouped_reference
from common.ops.linear.weight import LinearWeight, linear_from_grouped
from common.ops.moe.candidates import ExpertCandidate
from common.ops.moe.experts_reference import experts_reference
from common.ops.moe.form import ActivationKind, ExpertActivation, ExpertWeights, Routing
from common.ops.moe.grouped_weight import GroupedWeight
from common.ops.quant.group_layout import Code
from common.ops.quant.grouped import pack_grouped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a Hopper GPU"
    ),
]
MAX_ERROR = 0.06
"""In standard deviations of the results. Weights and activations are rounded to bf16: 0.041 was the most of millions."""


def random_weight(code: Code, group: int, size: int, depth: int, *, offsets: bool) -> LinearWeight:
    codes = torch.randint(0, 16, (size, depth), dtype=torch.uint8, device="cuda")
    scales = torch.rand(size, -(-depth // group), device="cuda") + 0.5
    added = 4 * torch.randn_like(scales) if offsets else None
    bias = torch.randn(size, device="cuda").bfloat16()
    return linear_from_grouped(pack_grouped(codes, scales, added, code=code, group=group), bias)


@pytest.mark.parametrize(("op", "splits"), [("linear", 1), ("split", 2), ("wide", 1), ("gated", 1)])
@pytest.mark.parametrize("block_m", [64, 128, 256])
@pytest.mark.parametrize(
    ("code", "group", "offsets"),
    [("int4", 128, True), ("int4", 64, False), ("int4", 32, True), ("fp4", 32, False), ("nf4", 64, False)],
)
def test_a_linear(code: Code, group: int, offsets: bool, block_m: int, op: Op, splits: int) -> None:
    """Rows around tiles; outputs and inputs that fill none; several turns of each program."""
    torch.manual_seed(0)
    for size, depth in ((328, 1000), (2 * 128 * 140, 320)):
        weight = random_weight(code, group, size, depth, offsets=offsets)
        for rows in (1, 64, 65, 130, 257):
            x = torch.randn(rows, depth, device="cuda").bfloat16()
            chosen = Candidate("unpacking", block_n=128, block_m=block_m, block_k=64, splits=splits, warps=12)
            found = linear_device.run(op, x, weight, chosen)
            found = (found.sum(0) if found.ndim == 3 else found).float()
            assert weight.grouped is not None
            meant = linear_grouped_reference(x, weight.grouped, weight.bias, torch.float32)
            if op == "gated":
                gate, up = meant.chunk(2, 1)
                meant = torch.nn.functional.silu(gate) * up
            assert ((found - meant).abs() / (meant.abs() + meant.std())).max() < MAX_ERROR


@pytest.mark.parametrize("weigh_inputs", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("name", ["mxfp4", "int4"])
@pytest.mark.parametrize("block_m", [64, 128, 256])
def test_experts(block_m: int, name: str, kind: ActivationKind, weigh_inputs: bool) -> None:
    """Experts without tokens, with few, with all of them, and with a bias."""
    torch.manual_seed(0)
    count, hidden, middle, top_k, activation = 7, 384, 192, 2, ExpertActivation(kind)

    def expert_weight(n: int, k: int) -> GroupedWeight:
        values = torch.randint(256, (count, n, k // 2), dtype=torch.uint8, device="cuda")
        if name == "int4":
            zeros = torch.randint(16, (count, n, k // 32), dtype=torch.uint8, device="cuda")
            return GroupedWeight(values, "int4", torch.rand(count, n, k // 32, device="cuda") / 32, zeros)
        exponents = torch.randint(119, 124, (count, n, k // 32), dtype=torch.uint8, device="cuda")
        return GroupedWeight(values, "mxfp4", exponents, bias=torch.randn(count, n, device="cuda"))

    pair = expert_weight(2 * middle, hidden), expert_weight(hidden, middle)
    packed = ExpertWeights.grouped(*pair).on_gpu
    assert packed is not None
    chosen = ExpertCandidate(128, block_m, warps=12, scaled=True, rounded=True, unpacking=True)
    from common.ops.moe.experts_triton import experts_triton

    for rows, spread in ((1, 7), (300, 7), (600, 2)):
        x = torch.randn(rows, hidden, device="cuda").bfloat16()
        ids = torch.rand(rows, spread, device="cuda").topk(top_k, dim=1).indices.int()
        routing = Routing(ids, torch.rand(rows, top_k, device="cuda"))
        found = experts_triton(x, routing, *packed, activation, chosen, weigh_inputs=weigh_inputs).float()
        gate_up, down = (linear.dequantised() for linear in pair)
        expected = experts_reference(
            x.float(),
            routing,
            gate_up,
            down,
            activation,
            gate_up_bias=pair[0].bias,
            down_bias=pair[1].bias,
            weigh_inputs=weigh_inputs,
        )
        assert (found - expected).norm() < 0.01 * expected.norm()
