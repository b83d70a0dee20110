"""Kernels of a mixture of experts, in Triton's interpreter, give what plain torch gives from dequantised weights."""

from __future__ import annotations

import pytest
import torch

from common.ops.backend import interpreted
from common.ops.moe.experts import experts
from common.ops.moe.experts_reference import experts_reference
from common.ops.moe.form import ExpertActivation, ExpertWeights, RouterForm, Routing
from common.ops.moe.grouped_weight import GroupedFormat, GroupedWeight
from common.ops.moe.route import route
from common.ops.moe.route_reference import route_reference

pytest.importorskip("triton")
HIDDEN, MIDDLE, EXPERTS = 160, 96, 5
CASES: list[tuple[GroupedFormat, int, ExpertActivation, bool]] = [
    ("plain", 1, ExpertActivation(), False),
    ("plain", 21, ExpertActivation("gelu_tanh"), True),
    ("fp8", 6, ExpertActivation(), False),
    ("mxfp4", 6, ExpertActivation("clamped_swiglu", 1.702, 0.5), False),
    ("int4", 6, ExpertActivation(), True),
]


def weight(n: int, k: int, kind: GroupedFormat, seed: int) -> GroupedWeight:
    made = torch.Generator().manual_seed(seed)
    bias = torch.randn(EXPERTS, n, generator=made)
    if kind == "plain":
        return GroupedWeight((torch.randn(EXPERTS, n, k, generator=made) / k**0.5).bfloat16(), bias=bias)
    if kind == "fp8":
        values = torch.randn(EXPERTS, n, k, generator=made).to(torch.float8_e4m3fn)
        return GroupedWeight(values, kind, torch.rand(EXPERTS, n, generator=made) / k**0.5, bias=bias)
    values = torch.randint(256, (EXPERTS, n, k // 2), generator=made, dtype=torch.uint8)
    if kind == "mxfp4":
        exponents = torch.randint(119, 124, (EXPERTS, n, k // 32), generator=made, dtype=torch.uint8)
        return GroupedWeight(values, kind, exponents, bias=bias)
    scale = torch.rand(EXPERTS, n, k // 32, generator=made) / 32
    zeros = torch.randint(16, scale.shape, generator=made, dtype=torch.uint8) if n == HIDDEN else None
    return GroupedWeight(values, kind, scale, zeros)


@pytest.mark.parametrize(("kind", "rows", "activation", "weigh_inputs"), CASES)
def test_the_kernels_give_what_plain_torch_gives(
    kind: GroupedFormat, rows: int, activation: ExpertActivation, weigh_inputs: bool
) -> None:
    made = torch.Generator().manual_seed(3)
    x = torch.randn(rows, HIDDEN, generator=made).bfloat16()
    routing = route(torch.randn(rows, EXPERTS, generator=made), RouterForm(top_k=2, renormalise=True))
    gate_up, down = weight(2 * MIDDLE, HIDDEN, kind, 0), weight(HIDDEN, MIDDLE, kind, 1)
    expected = experts_reference(
        x.float(),
        routing,
        gate_up.dequantised(),
        down.dequantised(),
        activation,
        gate_up_bias=gate_up.bias,
        down_bias=down.bias,
        weigh_inputs=weigh_inputs,
    )
    with interpreted():
        found = experts(x, routing, ExpertWeights.grouped(gate_up, down), activation, weigh_inputs=weigh_inputs)
    assert found.dtype == torch.bfloat16
    error = (found.float() - expected).norm() / expected.norm()
    assert error < 0.008, f"relative error {error:.4f}"


def test_all_tokens_to_one_expert() -> None:
    x = torch.randn(19, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    routing = Routing(torch.full((19, 1), EXPERTS - 1, dtype=torch.int32), torch.ones(19, 1))
    gate_up, down = weight(2 * MIDDLE, HIDDEN, "plain", 0), weight(HIDDEN, MIDDLE, "plain", 1)
    expected = experts_reference(
        x.float(),
        routing,
        gate_up.values,
        down.values,
        ExpertActivation(),
        gate_up_bias=gate_up.bias,
        down_bias=down.bias,
    )
    with interpreted():
        found = experts(x, routing, ExpertWeights.grouped(gate_up, down), ExpertActivation())
    assert (found.float() - expected).norm() < 0.008 * expected.norm()


def test_scales_of_another_shape_are_refused() -> None:
    values = torch.zeros(2, 4, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scales of mxfp4"):
        GroupedWeight(values, "mxfp4", torch.zeros(2, 4, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="scales of int4"):
        GroupedWeight(values, "int4", torch.zeros(2, 3, 2))


@pytest.mark.parametrize(
    "form",
    [
        RouterForm(top_k=3),
        RouterForm(top_k=2, renormalise=True, scale=2.5),
        RouterForm(top_k=3, scoring="sigmoid", renormalise=True),
        RouterForm(top_k=4, scoring="softmax_selected"),
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [False, True])
def test_the_router_chooses_and_weighs_as_plain_torch(form: RouterForm, biased: bool) -> None:
    made = torch.Generator().manual_seed(5)
    logits = torch.randn(9, 11, generator=made)
    bias = torch.randn(11, generator=made) if biased else None
    expected = route_reference(logits, form, bias)
    with interpreted():
        found = route(logits, form, bias)
    assert found.ids.tolist() == expected.ids.tolist()
    torch.testing.assert_close(found.weights, expected.weights)


def test_a_router_without_numbers_still_chooses_different_experts() -> None:
    with interpreted():
        ids = route(torch.full((1, 6), float("nan")), RouterForm(top_k=3, scoring="sigmoid")).ids
    assert ids.tolist() == [[0, 1, 2]]
