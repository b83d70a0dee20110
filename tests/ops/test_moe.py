"""A mixture of experts on a CPU is what plain torch computes, and a token's answer does not depend on its company."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from common.ops.moe.experts import experts, pack_experts
from common.ops.moe.experts_reference import activate_reference, experts_reference
from common.ops.moe.form import ExpertActivation, RouterForm, Routing
from common.ops.moe.route import route

HIDDEN, MIDDLE, EXPERTS = 48, 20, 8


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=made) / shape[-1] ** 0.5).to(dtype)

    return {
        "gate_up": random(EXPERTS, 2 * MIDDLE, HIDDEN),
        "down": random(EXPERTS, HIDDEN, MIDDLE),
        "gate_up_bias": random(EXPERTS, 2 * MIDDLE),
        "down_bias": random(EXPERTS, HIDDEN),
    }


def routed(rows: int, form: RouterForm, seed: int = 1) -> Routing:
    return route(torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(seed)), form)


@pytest.mark.parametrize(
    ("rows", "activation", "weigh_inputs", "biased"),
    list(
        itertools.product(
            (1, 5, 33),
            (ExpertActivation(), ExpertActivation("gelu_tanh"), ExpertActivation("clamped_swiglu", 1.702, 0.5)),
            (False, True),
            (False, True),
        )
    ),
)
def test_experts_are_what_plain_torch_gives(rows: int, activation: ExpertActivation, weigh_inputs: bool, biased: bool) -> None:
    given = weights()
    biases: dict[str, Any] = {name: given[name] for name in ("gate_up_bias", "down_bias") if biased}
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(2))
    routing = routed(rows, RouterForm(top_k=3, renormalise=True))
    packed = pack_experts(given["gate_up"], given["down"], **biases)
    expected = experts_reference(x, routing, given["gate_up"], given["down"], activation, weigh_inputs=weigh_inputs, **biases)
    found = experts(x, routing, packed, activation, weigh_inputs=weigh_inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert packed.parameters == EXPERTS * 3 * MIDDLE * HIDDEN


def test_a_token_does_not_depend_on_its_company() -> None:
    given, form = weights(), RouterForm(top_k=2)
    packed = pack_experts(given["gate_up"], given["down"])
    x, routing = torch.randn(40, HIDDEN), routed(40, form)
    together = experts(x, routing, packed, ExpertActivation())
    for rows in (slice(0, 1), slice(7, 8), slice(3, 20)):
        alone = experts(x[rows], Routing(routing.ids[rows], routing.weights[rows]), packed, ExpertActivation())
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_an_activation_does_not_depend_on_its_company(kind: Any) -> None:
    """Of a width at whose end torch takes another function, and of so many rows that threads share them."""
    activation, threads = ExpertActivation(kind, 1.702, 7.0), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for size, rows in ((20, 9), (2048, 50)):
            middle = 3 * torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(3))
            together = activate_reference(middle, activation)
            for row in range(rows):
                assert torch.equal(activate_reference(middle[row : row + 1], activation)[0], together[row])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_selected"])
def test_a_routing_does_not_depend_on_its_company(scoring: Any) -> None:
    logits, form = 3 * torch.randn(30, 20, generator=torch.Generator().manual_seed(4)), RouterForm(top_k=5, scoring=scoring)
    together = route(logits, form)
    for row in range(30):
        alone = route(logits[row : row + 1], form)
        assert torch.equal(alone.ids[0], together.ids[row]) and torch.equal(alone.weights[0], together.weights[row])


def test_all_tokens_may_go_to_one_expert_and_no_token_may_come() -> None:
    given = weights()
    packed = pack_experts(given["gate_up"], given["down"])
    x = torch.randn(17, HIDDEN)
    routing = Routing(torch.full((17, 1), 5, dtype=torch.int32), torch.ones(17, 1))
    expected = experts_reference(x, routing, given["gate_up"], given["down"], ExpertActivation())
    torch.testing.assert_close(experts(x, routing, packed, ExpertActivation()), expected, rtol=1e-5, atol=1e-5)
    nothing = experts(x[:0], Routing(routing.ids[:0], routing.weights[:0]), packed, ExpertActivation())
    assert nothing.shape == (0, HIDDEN)


def test_softmax_of_all_and_of_the_chosen_differ_by_what_is_left_out() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    exponents = logits.exp()
    over_all = route(logits, RouterForm(top_k=2))
    assert over_all.ids.tolist() == [[0, 2]] and over_all.ids.dtype == torch.int32
    torch.testing.assert_close(over_all.weights, exponents[:, [0, 2]] / exponents.sum())
    chosen = exponents[:, [0, 2]] / exponents[:, [0, 2]].sum()
    torch.testing.assert_close(route(logits, RouterForm(top_k=2, scoring="softmax_selected")).weights, chosen)
    torch.testing.assert_close(route(logits, RouterForm(top_k=2, renormalise=True, scale=2.5)).weights, 2.5 * chosen)


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    found = route(logits, RouterForm(top_k=2, scoring="sigmoid"), torch.tensor([-5.0, 0.0, 0.0, 5.0]))
    assert found.ids.tolist() == [[3, 2]]
    torch.testing.assert_close(found.weights, torch.sigmoid(torch.tensor([[-1.0, 1.0]])))


def test_only_the_best_groups_are_chosen_from() -> None:
    # the first group has the best expert, the second the best two
    logits = torch.tensor([[4.0, -9.0, 2.5, 2.4, 0.0, 0.0]])
    form = RouterForm(top_k=2, scoring="softmax_selected", groups=3, top_groups=1)
    assert route(logits, form).ids.tolist() == [[2, 3]]
    assert route(logits, RouterForm(top_k=2, scoring="softmax_selected")).ids.tolist() == [[0, 2]]


def test_a_row_with_minus_infinity_leaves_that_expert_out() -> None:
    logits = torch.tensor([[float("-inf"), 1.0, 0.0, float("-inf")]])
    found = route(logits, RouterForm(top_k=2))
    assert sorted(found.ids[0].tolist()) == [1, 2] and torch.isfinite(found.weights).all()


@pytest.mark.parametrize(
    "form",
    [
        RouterForm(top_k=0),
        RouterForm(top_k=9),
        RouterForm(top_k=2, groups=3),
        RouterForm(top_k=2, groups=4, top_groups=5),
        RouterForm(top_k=3, groups=4, top_groups=1),
    ],
)
def test_a_choice_that_can_not_be_made_is_an_error(form: RouterForm) -> None:
    with pytest.raises(ValueError, match="experts"):
        route(torch.zeros(2, EXPERTS), form)


def test_shapes_that_do_not_fit_are_errors() -> None:
    given = weights()
    packed = pack_experts(given["gate_up"], given["down"])
    routing = routed(3, RouterForm(top_k=2))
    with pytest.raises(ValueError, match="experts are"):
        pack_experts(given["gate_up"], given["down"][:, :, 1:])
    with pytest.raises(ValueError, match="a bias of experts"):
        pack_experts(given["gate_up"], given["down"], given["gate_up_bias"][:, 1:])
    with pytest.raises(ValueError, match="not routed"):
        experts(torch.randn(4, HIDDEN), routing, packed, ExpertActivation())
    with pytest.raises(ValueError, match="expert 9 of 8"):
        experts(torch.randn(3, HIDDEN), routing._replace(ids=routing.ids + 9 - routing.ids.max()), packed, ExpertActivation())
    with pytest.raises(ValueError, match="bias"):
        route(torch.zeros(2, 4), RouterForm(top_k=1), torch.zeros(3))
