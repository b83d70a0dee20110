"""Kernels of a mixture of experts, in Triton's interpreter, give what plain torch gives from dequantised weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.ops.backend import interpreted
from common.ops.moe.candidates import LIBRARY, ExpertCandidate, bucket
from common.ops.moe.experts import experts
from common.ops.moe.experts_reference import experts_reference
from common.ops.moe.form import ActivationKind, ExpertActivation, ExpertWeights, RouterForm, Routing
from common.ops.moe.grouped_weight import FP8_BLOCK, GroupedWeight
from common.ops.moe.packed_layout import GroupedFormat
from common.ops.moe.packed_weight import packed_weight
from common.ops.moe.route import route
from common.ops.moe.route_reference import route_reference
from tests.fixtures.slow import some_slow

pytest.importorskip("triton")
HIDDEN, MIDDLE, EXPERTS = 160, 96, 5
CLAMPED = ExpertActivation("clamped_swiglu", 1.702, 0.5)
FORMATS = ("plain", "fp8", "fp8_blocks", "mxfp4", "int4", "int4+zeros")
Pair = tuple[GroupedWeight, GroupedWeight]


def weight(n: int, k: int, name: str, seed: int, count: int = EXPERTS) -> GroupedWeight:
    """Return random weights with a bias; of "int4" groups of all of k, of "int4+zeros" of 32."""
    made = torch.Generator().manual_seed(seed)
    bias = torch.randn(count, n, generator=made)
    if name == "plain":
        return GroupedWeight((torch.randn(count, n, k, generator=made) / k**0.5).bfloat16(), bias=bias)
    kind: GroupedFormat = "mxfp4" if name == "mxfp4" else "int4" if name.startswith("int4") else "fp8"
    if kind == "fp8":
        values = torch.randn(count, n, k, generator=made).to(torch.float8_e4m3fn)
        size = (count, n) if name == "fp8" else (count, -(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
        return GroupedWeight(values, kind, (0.2 + torch.rand(size, generator=made)) / k**0.5, bias=bias)
    values = torch.randint(256, (count, n, k // 2), generator=made, dtype=torch.uint8)
    if kind == "mxfp4":
        exponents = torch.randint(119, 124, (count, n, k // 32), generator=made, dtype=torch.uint8)
        return GroupedWeight(values, kind, exponents, bias=bias)
    groups = k // 32 if name == "int4+zeros" else 1
    scale = torch.rand(count, n, groups, generator=made) / 32
    zeros = torch.randint(16, scale.shape, generator=made, dtype=torch.uint8) if name == "int4+zeros" else None
    return GroupedWeight(values, kind, scale, zeros)


def pair_of(name: str, hidden: int = HIDDEN, middle: int = MIDDLE) -> Pair:
    return weight(2 * middle, hidden, name, 0), weight(hidden, middle, name, 1)


def tokens(rows: int, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(3)).bfloat16()


def routed(rows: int, top_k: int) -> Routing:
    logits = torch.randn(rows, EXPERTS, generator=torch.Generator().manual_seed(4))
    return route_reference(logits, RouterForm(top_k=top_k, renormalise=True))


def error_of(
    found: torch.Tensor,
    x: torch.Tensor,
    routing: Routing,
    pair: Pair,
    activation: ExpertActivation,
    *,
    weigh_inputs: bool = False,
) -> float:
    gate_up, down = pair
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
    return float((found.float() - expected).norm() / expected.norm())


def run(x: torch.Tensor, routing: Routing, pair: Pair, activation: ExpertActivation, chosen: ExpertCandidate) -> torch.Tensor:
    from common.ops.moe.experts_triton import experts_triton

    with interpreted():
        return experts_triton(x, routing, packed_weight(pair[0]), packed_weight(pair[1]), activation, chosen)


@pytest.mark.parametrize(
    ("name", "rows", "top_k"),
    some_slow(
        [(name, rows, top_k) for name in FORMATS for rows in (1, 3, 16, 17, 100) for top_k in (1, 2, 4)],
        quick={("mxfp4", 3, 2), ("plain", 3, 2), ("fp8_blocks", 1, 2), ("int4+zeros", 1, 2), ("plain", 17, 4)},
    ),
)
def test_the_kernels_give_what_plain_torch_gives(name: str, rows: int, top_k: int) -> None:
    x, routing, pair = tokens(rows), routed(rows, top_k), pair_of(name)
    activation = CLAMPED if name == "mxfp4" else ExpertActivation()
    with interpreted():
        found = experts(x, routing, ExpertWeights.grouped(*pair), activation)
    assert found.dtype == torch.bfloat16
    assert error_of(found, x, routing, pair, activation) < 0.008


CHOICES = {
    "sorted, split": ExpertCandidate(32, 8, splits=2, warps=2),
    "direct, split": ExpertCandidate(32, 8, splits=2, warps=2, direct=True),
    "scaled": ExpertCandidate(64, 16, scaled=True, neighbours=3),
    "rounded": ExpertCandidate(64, 16, scaled=True, rounded=True),
    "halved": ExpertCandidate(64, 32, scaled=True, halvings=2),
}


@pytest.mark.parametrize(
    ("name", "choice"),
    some_slow(
        [(name, choice) for name in ("mxfp4", "int4+zeros") for choice in CHOICES],
        quick={("mxfp4", "direct, split"), ("mxfp4", "scaled")},
    ),
)
def test_every_way_to_compute_gives_the_same(name: str, choice: str) -> None:
    x, routing, pair = tokens(4, 96), routed(4, 2), pair_of(name, 96, 160)
    found = run(x, routing, pair, ExpertActivation(), CHOICES[choice])
    assert error_of(found, x, routing, pair, ExpertActivation()) < 0.008


@pytest.mark.parametrize(
    ("rows", "top_k", "weigh_inputs", "kind"),
    some_slow(
        [
            (rows, top_k, weigh, kind)
            for rows in (1, 9, 40)
            for top_k in (1, 2, 4)
            for weigh in (False, True)
            for kind in ("silu", "clamped_swiglu")
        ],
        quick={(9, 2, False, "clamped_swiglu"), (9, 1, True, "silu")},
    ),
)
def test_the_library_gives_what_plain_torch_gives(rows: int, top_k: int, weigh_inputs: bool, kind: ActivationKind) -> None:
    from common.ops.moe.experts_triton import experts_triton

    x, routing, pair = tokens(rows), routed(rows, top_k), pair_of("plain")
    activation, packed = ExpertActivation(kind, limit=0.5), (packed_weight(pair[0]), packed_weight(pair[1]))
    with interpreted():
        found = experts_triton(x, routing, *packed, activation, LIBRARY, weigh_inputs=weigh_inputs)
    assert error_of(found, x, routing, pair, activation, weigh_inputs=weigh_inputs) < 0.01


@pytest.mark.parametrize("expert", [0, EXPERTS - 1])
def test_the_library_takes_experts_without_tokens(expert: int) -> None:
    x, pair = tokens(9), pair_of("plain")
    routing = Routing(torch.full((9, 1), expert, dtype=torch.int32), torch.ones(9, 1))
    found = run(x, routing, pair, ExpertActivation(), LIBRARY)
    assert error_of(found, x, routing, pair, ExpertActivation()) < 0.01


@pytest.mark.parametrize("name", some_slow(("fp8", "fp8_blocks"), quick=("fp8_blocks",)))
def test_quantised_activations_are_as_close_as_their_precision(name: str) -> None:
    x, routing, pair = tokens(3, 256), routed(3, 2), pair_of(name, 256, 160)
    found = run(x, routing, pair, ExpertActivation(), ExpertCandidate(64, 16, 128, quantised=True))
    assert error_of(found, x, routing, pair, ExpertActivation()) < 0.05


@pytest.mark.parametrize(
    ("rows", "hidden", "middle", "block_n", "weigh_inputs"),
    some_slow(
        [
            (rows, hidden, middle, block_n, weigh)
            for rows in (1, 30)
            for hidden, middle in ((256, 128), (320, 192), (384, 256))
            for block_n in (128, 256)
            for weigh in (False, True)
            if not middle % (block_n // 2)
        ],
        quick={(30, 320, 192, 128, False), (1, 256, 128, 256, True)},
    ),
)
def test_halves_of_tiles_have_their_own_scales(rows: int, hidden: int, middle: int, block_n: int, weigh_inputs: bool) -> None:
    from common.ops.moe.experts_triton import experts_triton

    x, routing, pair = tokens(rows, hidden), routed(rows, 1 if weigh_inputs else 2), pair_of("fp8_blocks", hidden, middle)
    packed, chosen = (packed_weight(pair[0]), packed_weight(pair[1])), ExpertCandidate(block_n, 16, 128, halves=True)
    with interpreted():
        found = experts_triton(x, routing, *packed, ExpertActivation(), chosen, weigh_inputs=weigh_inputs)
    assert error_of(found, x, routing, pair, ExpertActivation(), weigh_inputs=weigh_inputs) < 0.05


@pytest.mark.parametrize(
    ("name", "halvings", "counts"),
    some_slow(
        [
            (name, halvings, counts)
            for name in ("mxfp4", "fp8_blocks", "plain")
            for halvings in (1, 2)
            for counts in ((64, 33, 32, 0, 1), (17, 16, 15, 80, 48))
        ],
        quick={("mxfp4", 2, (64, 33, 32, 0, 1)), ("fp8_blocks", 2, (17, 16, 15, 80, 48))},
    ),
)
def test_tiles_of_few_pairs_are_computed_narrower(name: str, halvings: int, counts: tuple[int, ...]) -> None:
    """Tiles of 64 pairs, halved to 16: every width, full, one short of it and one more."""
    hidden, middle = (128, 128) if name == "fp8_blocks" else (96, 64)
    ids = torch.repeat_interleave(torch.arange(EXPERTS, dtype=torch.int32), torch.tensor(counts))
    rows = len(ids)
    ids = ids[torch.randperm(rows, generator=torch.Generator().manual_seed(6))].view(rows, 1)
    x, routing, pair = tokens(rows, hidden), Routing(ids, torch.full((rows, 1), 0.75)), pair_of(name, hidden, middle)
    chosen = ExpertCandidate(128, 64, 0 if name == "mxfp4" else 128 if name == "fp8_blocks" else 64, halvings=halvings)
    halves, scaled = name == "fp8_blocks", name == "mxfp4"
    found = run(x, routing, pair, ExpertActivation(), replace(chosen, halves=halves, scaled=scaled, rounded=True))
    assert error_of(found, x, routing, pair, ExpertActivation()) < (0.05 if halves else 0.008)


@pytest.mark.parametrize(
    ("direct", "expert"),
    some_slow([(False, 0), (False, EXPERTS - 1), (True, 0), (True, EXPERTS - 1)], quick={(False, EXPERTS - 1), (True, 0)}),
)
def test_all_tokens_to_one_expert(direct: bool, expert: int) -> None:
    x, pair = tokens(9), pair_of("plain")
    routing = Routing(torch.full((9, 1), expert, dtype=torch.int32), torch.ones(9, 1))
    found = run(x, routing, pair, ExpertActivation(), ExpertCandidate(32, 8, 64, direct=direct))
    assert error_of(found, x, routing, pair, ExpertActivation()) < 0.008


@pytest.mark.parametrize("name", some_slow(("plain", "mxfp4"), quick=("plain",)))
def test_weights_may_scale_inputs(name: str) -> None:
    x, routing, pair = tokens(5), routed(5, 1), pair_of(name)
    routing = Routing(routing.ids, torch.rand(5, 1, generator=torch.Generator().manual_seed(9)))
    activation = ExpertActivation("gelu_tanh")
    with interpreted():
        found = experts(x, routing, ExpertWeights.grouped(*pair), activation, weigh_inputs=True)
    assert error_of(found, x, routing, pair, activation, weigh_inputs=True) < 0.008


def test_partial_sums_add_up_to_the_result() -> None:
    x, routing, weights = tokens(2), routed(2, 2), ExpertWeights.grouped(*pair_of("mxfp4"))
    with interpreted():
        whole = experts(x, routing, weights, CLAMPED)
        parts = experts(x, routing, weights, CLAMPED, split=True)
    assert parts.dtype == torch.float32
    assert parts.shape[1:] == x.shape
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert torch.equal(total.bfloat16(), whole)


@pytest.mark.parametrize("name", some_slow(("plain", "mxfp4"), quick=("plain",)))
def test_with_batch_invariance_a_token_does_not_depend_on_its_company(name: str) -> None:
    x, routing, weights = tokens(9), routed(9, 1), ExpertWeights.grouped(*pair_of(name), batch_invariant=True)
    with interpreted():
        together = experts(x, routing, weights, CLAMPED)
        for row in (0, 8):
            alone = Routing(*(tensor[row : row + 1] for tensor in routing))
            assert torch.equal(experts(x[row : row + 1], alone, weights, CLAMPED), together[row : row + 1])


def test_no_tokens_give_no_answers() -> None:
    empty = Routing(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
    with interpreted():
        found = experts(tokens(0), empty, ExpertWeights.grouped(*pair_of("plain")), ExpertActivation())
    assert found.shape == (0, HIDDEN)


def test_a_program_does_not_look_through_more_pairs_than_it_can() -> None:
    with pytest.raises(ValueError, match="64 pairs"):
        run(tokens(33), routed(33, 2), pair_of("plain"), ExpertActivation(), ExpertCandidate(32, 8, 64, direct=True))


@pytest.mark.parametrize("block_m", [8, 32])
def test_sorted_pairs_are_in_tiles_of_one_expert(block_m: int) -> None:
    from common.ops.moe.sort_triton import sorted_pairs

    for ids in (
        torch.randint(7, (150,), generator=torch.Generator().manual_seed(1)),
        torch.full((150,), 6),
        torch.zeros(70, dtype=torch.int64),
        torch.tensor([3]),
    ):
        with interpreted():
            order, tiles, where = sorted_pairs(ids.int()[:, None], 7, block_m, with_places=True)
        assert order.tolist() == torch.argsort(ids, stable=True).tolist()
        assert where is not None and order[where.long()].tolist() == list(range(len(ids)))
        places: list[int] = []
        for expert, first, count, end in tiles.tolist():
            assert 0 <= count <= block_m and end == first + count
            places += range(first, first + count)
            assert all(ids[order[place]] == expert for place in range(first, first + count))
        assert places == list(range(len(ids)))


def test_scales_of_another_shape_are_refused() -> None:
    values = torch.zeros(2, 4, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scales of mxfp4"):
        GroupedWeight(values, "mxfp4", torch.zeros(2, 4, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="scales of int4"):
        GroupedWeight(values, "int4", torch.zeros(2, 3, 2))
    with pytest.raises(ValueError, match="scales of fp8"):
        GroupedWeight(torch.zeros(2, 200, 64, dtype=torch.float8_e4m3fn), "fp8", torch.zeros(2, 1, 1))


def test_a_bucket_holds_its_rows() -> None:
    assert [bucket(rows) for rows in (1, 3, 17, 4096, 9000, 20000)] == [1, 4, 32, 4096, 16384, 16384]


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
