"""One pass from the QKV projection to Q and the pool: equal to its reference for every shape, dtype and kind of pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from common.ops import backend
from common.ops.kv.forms import HeadForm, KvTarget, Temperature
from common.ops.kv.hadamard_reference import hadamard
from common.ops.kv.qkv_rope import QueryKeyValue
from common.ops.kv.qkv_rope import qkv_rope as structured
from common.ops.kv.qkv_rope_reference import qkv_rope_reference
from common.ops.kv.qkv_rope_triton import qkv_rope_triton

LAYERS, LAYER, BLOCK_TOKENS, BLOCKS, MAX_POSITIONS = 3, 2, 16, 5, 200
EPS = 1e-6
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, BF16: 1.6e-2}


@dataclass
class Shape:
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def size(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


SHAPES = [Shape(9, 3, 64), Shape(4, 2, 128), Shape(3, 1, 80), Shape(5, 5, 32), Shape(2, 1, 96), Shape(2, 1, 256)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs hold NaN until they are written."""
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: torch.full(shape, torch.nan).to(dtype))


def make_call(shape: Shape, rows: int, **changes: Any) -> dict[str, Any]:
    """Arguments of a call: fresh random inputs, the first row in the pool's last slot, the last without one, a pool of NaN."""
    angles = torch.randn(MAX_POSITIONS, shape.head_dim // 2) * 9
    last = BLOCKS * BLOCK_TOKENS - 1
    slots = torch.cat((torch.tensor([last]), torch.randperm(last)))[:rows]
    slots[-1] = -1 if rows > 1 else slots[-1]
    pool_dtype = changes.pop("pool_dtype", torch.float32)
    pool = torch.full((BLOCKS, LAYERS, 2, BLOCK_TOKENS, shape.kv_heads, shape.head_dim), torch.nan).to(pool_dtype)
    call = {
        "qkv": torch.randn(rows, shape.size),
        "num_heads": shape.heads,
        "positions": torch.randint(0, MAX_POSITIONS, (rows,)),
        "rope": torch.cat((angles.cos(), angles.sin()), -1),
        "q_norm": None,
        "k_norm": None,
        "eps": EPS,
        "bias": None,
        "pool": pool,
        "layer": LAYER,
        "slots": slots,
        "dtype": torch.float32,
        "kv_scale": None,
        "k_center": None,
        "mix": False,
        "without_weights": False,
        "rotated": None,
        "interleaved": False,
        "temperature": None,
    }
    assert changes.keys() <= call.keys()
    return call | changes


FORM, TARGET = HeadForm.__dataclass_fields__, KvTarget.__dataclass_fields__


def structs(call: dict[str, Any]) -> dict[str, Any]:
    """The same call, its arguments in their structs."""
    form = HeadForm(**{name: value for name, value in call.items() if name in FORM})
    target = KvTarget(**{name: value for name, value in call.items() if name in TARGET})
    rest = {name: value for name, value in call.items() if name not in FORM and name not in TARGET}
    return {"form": form, "target": target, **rest}


def qkv_rope(**call: Any) -> Any:
    return structured(**structs(call))


def compare(call: dict[str, Any], num_warps: int | None = None) -> None:
    """Q, K, V and the whole pool, what nobody writes included."""
    expected_pool = call["pool"].clone()
    expected = qkv_rope_reference(**structs(call | {"pool": expected_pool}))
    with backend.interpreted():
        if num_warps is None:
            found = qkv_rope(**call, need_kv=True)
            assert isinstance(found, QueryKeyValue)
        else:
            found = qkv_rope_triton(**structs(call), need_kv=True, num_warps=num_warps)
    tolerance = TOLERANCES[call["dtype"]]
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert one.dtype == call["dtype"]
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    # where K is rounded to float8 from two roundings of one number, it may be the neighbour
    stored = 0.13 if call["pool"].dtype == FP8 else tolerance
    torch.testing.assert_close(call["pool"].float(), expected_pool.float(), atol=tolerance, rtol=stored, equal_nan=True)
    if call["pool"].dtype == FP8:
        same = call["pool"].view(torch.uint8) == expected_pool.view(torch.uint8)
        assert same.float().mean() > 0.98


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("rows", "normed"), [(1, True), (3, False)])
def test_equals_the_reference(shape: Shape, rows: int, normed: bool) -> None:
    norms = {"q_norm": torch.randn(shape.head_dim), "k_norm": torch.randn(shape.head_dim)} if normed else {}
    compare(make_call(shape, rows, **norms))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_partial_sums_and_bias_are_added(dtype: torch.dtype, splits: int) -> None:
    shape = Shape(9, 3, 64)
    qkv = torch.randn(splits, 3, shape.size) if splits else torch.randn(3, shape.size).to(dtype)
    bias = torch.randn(shape.size).to(dtype)
    compare(make_call(shape, 3, qkv=qkv, bias=bias, dtype=dtype, pool_dtype=dtype))


@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_float8_pool_holds_scaled_and_saturated_values(splits: int, scaled: bool) -> None:
    shape = Shape(4, 2, 128)
    qkv = 400 * (torch.randn(splits, 3, shape.size) if splits else torch.randn(3, shape.size).to(BF16))
    scale = torch.rand(LAYERS, 2, shape.kv_heads) + 0.5 if scaled else None
    norms = {"q_norm": torch.randn(128).to(BF16), "k_norm": torch.randn(128).to(BF16)}
    call = make_call(shape, 3, qkv=qkv, kv_scale=scale, dtype=BF16, pool_dtype=FP8, **norms)
    compare(call)
    values = call["pool"][:, LAYER, 1].float()
    assert values[~values.isnan()].abs().max() == 448.0


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
def test_every_candidate_gives_the_same_values(num_warps: int, mixed: bool) -> None:
    shape = Shape(9, 3, 64)
    compare(make_call(shape, 3, q_norm=torch.randn(64), k_norm=torch.randn(64), mix=mixed), num_warps)


@pytest.mark.parametrize("shape", [*SHAPES, Shape(3, 1, 18)], ids=str)
@pytest.mark.parametrize(("dtype", "pool_dtype"), [(torch.float32, torch.float32), (torch.float32, FP8), (BF16, FP8)])
@pytest.mark.parametrize(("rows", "normed"), [(1, False), (3, True)])
def test_centred_and_mixed_equals_the_reference(
    shape: Shape, dtype: torch.dtype, pool_dtype: torch.dtype, rows: int, normed: bool
) -> None:
    changes: dict[str, Any] = {"k_center": torch.randn(LAYERS, shape.kv_heads, shape.head_dim), "mix": True}
    if normed:
        changes |= {name: torch.randn(shape.head_dim).to(dtype) for name in ("q_norm", "k_norm")}
        changes |= {"kv_scale": torch.rand(LAYERS, 2, shape.kv_heads) + 0.5}
    qkv = torch.randn(2, rows, shape.size)
    compare(make_call(shape, rows, qkv=qkv, dtype=dtype, pool_dtype=pool_dtype, **changes))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("shape", "rotated"), [(Shape(4, 2, 64), 32), (Shape(3, 1, 96), 72), (Shape(2, 1, 128), 6)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_part_of_each_head_is_rotated(shape: Shape, rotated: int, interleaved: bool, mixed: bool) -> None:
    changes: dict[str, Any] = {"k_center": torch.randn(LAYERS, shape.kv_heads, shape.head_dim), "mix": True} if mixed else {}
    angles = torch.randn(MAX_POSITIONS, rotated // 2) * 9
    changes |= {"rope": torch.cat((angles.cos(), angles.sin()), -1), "rotated": rotated, "interleaved": interleaved}
    norms = {name: torch.randn(shape.head_dim) for name in ("q_norm", "k_norm")}
    bias = torch.randn(shape.size)
    compare(make_call(shape, 3, qkv=torch.randn(2, 3, shape.size), bias=bias, **norms, **changes))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("shape", [Shape(4, 2, 64), Shape(3, 1, 80)], ids=str)
def test_interleaved_pairs_leave_as_halves(shape: Shape, mixed: bool) -> None:
    changes: dict[str, Any] = {"k_center": torch.randn(LAYERS, shape.kv_heads, shape.head_dim), "mix": True} if mixed else {}
    bias = torch.randn(shape.size)
    call = make_call(shape, 3, qkv=torch.randn(2, 3, shape.size), bias=bias, without_weights=True, interleaved=True, **changes)
    compare(call)


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_are_scaled_by_their_position(normed: bool, shift: float) -> None:
    shape = Shape(4, 2, 64)
    positions = torch.tensor([0, 24, 199])
    tempered = {"temperature": Temperature(0.1, 25.0, shift), "positions": positions}
    compare(make_call(shape, 3, rope=None, rotated=0, without_weights=normed, **tempered))
    compare(make_call(shape, 3, without_weights=normed, **tempered))


def test_centring_and_mixing_are_each_without_the_other() -> None:
    shape = Shape(4, 2, 64)
    compare(make_call(shape, 3, k_center=torch.randn(LAYERS, 2, 64)))
    compare(make_call(shape, 3, mix=True))


@pytest.mark.parametrize("head_dim", [2, 18, 32, 64, 80, 96, 128, 256])
def test_mixing_is_orthonormal_and_its_own_inverse(head_dim: int) -> None:
    matrix = hadamard(head_dim)
    torch.testing.assert_close(matrix @ matrix, torch.eye(head_dim))
    assert torch.equal(matrix, matrix.T)
    if head_dim & (head_dim - 1) == 0:
        torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, head_dim**-0.5))


def scores(made: QueryKeyValue) -> torch.Tensor:
    """float32 [heads, rows, rows], of every row's query with every row's key."""
    query, key = made.query.float().transpose(0, 1), made.key.float().transpose(0, 1)
    return query @ key.repeat_interleave(len(query) // len(key), 0).mT


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_softmax_does_not_see_that_keys_are_centred_and_mixed(head_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(6, 2, head_dim)
    plain = make_call(shape, 8, dtype=dtype)
    moved = plain | {"k_center": torch.randn(LAYERS, 2, head_dim), "mix": True, "pool": plain["pool"].clone()}
    with backend.interpreted():
        before, after = qkv_rope(**plain, need_kv=True), qkv_rope(**moved, need_kv=True)
    assert torch.equal(before.value, after.value)
    assert torch.equal(plain["pool"][:, LAYER, 1].nan_to_num(), moved["pool"][:, LAYER, 1].nan_to_num())
    difference = scores(before) - scores(after)
    constant = difference.mean(-1, keepdim=True)
    assert constant.abs().max() > 1  # of a query, over its keys
    largest = TOLERANCES[dtype] * scores(before).abs().max().item()
    torch.testing.assert_close(difference, constant.expand_as(difference), atol=largest, rtol=0)


def through_the_pool(call: dict[str, Any], **changes: Any) -> float:
    """Root mean square of the error of scores, as a softmax sees it, of keys read from a float8 pool."""
    exact = call | {"pool": torch.zeros(call["pool"].shape), "dtype": torch.float32}
    stored = call | {"pool": torch.zeros(call["pool"].shape).to(FP8), "dtype": BF16} | changes
    with backend.interpreted():
        expected, made = qkv_rope(**exact, need_kv=True), qkv_rope(**stored, need_kv=True)
    keys = stored["pool"][:, LAYER, 0].flatten(0, 1)[stored["slots"]]
    error = scores(made._replace(key=keys)) - scores(expected)
    return (error - error.mean(-1, keepdim=True)).square().mean().sqrt().item()


def test_keys_with_large_channels_lose_less_in_a_float8_pool() -> None:
    shape, rows = Shape(4, 2, 64), 24
    qkv = torch.randn(rows, 8, 64)
    qkv[:, :6, 5] *= 8  # Q and K
    qkv[:, 4:6, 9] += 20  # of all keys
    rope = torch.cat((torch.ones(MAX_POSITIONS, 32), torch.zeros(MAX_POSITIONS, 32)), -1)
    call = make_call(shape, rows, qkv=qkv.flatten(1), rope=rope, slots=torch.arange(rows))
    center = torch.zeros(LAYERS, 2, 64)
    center[LAYER, :, 9] = 20
    plain = through_the_pool(call)
    mixed = through_the_pool(call, mix=True)
    both = through_the_pool(call, k_center=center, mix=True)
    assert both < mixed / 1.5 < plain / 2
    assert both < plain / 3


def test_views_of_partials_and_narrow_positions() -> None:
    shape = Shape(4, 2, 32)
    qkv = torch.randn(3, 8, shape.size + 16)[:2, 2:5, : shape.size]
    call = make_call(shape, 3, qkv=qkv, positions=torch.tensor([0, MAX_POSITIONS - 1, 7], dtype=torch.int32))
    compare(call)
    with backend.interpreted():
        query = qkv_rope(**call)
    assert query.shape == (3, 4, 32)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_row_has_the_same_bits_in_every_batch(mixed: bool) -> None:
    shape = Shape(9, 3, 64)
    call = make_call(shape, 5, q_norm=torch.randn(64), k_norm=torch.randn(64), mix=mixed)
    alone = call | {name: call[name][3:4] for name in ("qkv", "positions", "slots")} | {"pool": call["pool"].clone()}
    with backend.interpreted():
        query, query_alone = qkv_rope(**call), qkv_rope(**alone)
    assert torch.equal(query[3:4], query_alone)


def test_no_rows_are_no_work() -> None:
    call = make_call(Shape(4, 2, 32), 1)
    call |= {name: call[name][:0] for name in ("qkv", "positions", "slots")}
    with backend.interpreted():
        assert qkv_rope(**call).shape == (0, 4, 32)
    assert bool(call["pool"].isnan().all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.randn(2, 100)}, "takes"),
        ({"qkv": torch.randn(2, 2, 256).bfloat16()}, "partial sums"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "slot"),
        ({"positions": torch.zeros(2)}, "positions"),
        ({"rope": torch.zeros(9, 16)}, "sines"),
        ({"q_norm": torch.zeros(32)}, "both or neither"),
        ({"q_norm": torch.zeros(32), "k_norm": torch.zeros(32), "without_weights": True}, "with weights or without"),
        ({"rotated": 7}, "even part"),
        ({"rotated": 34}, "even part"),
        ({"rotated": 0}, "0 dimensions"),
        ({"rope": None, "rotated": 0, "interleaved": True}, "interleaved dimensions are rotated"),
        ({"rope": None}, "32 dimensions"),
        ({"bias": torch.zeros(32)}, "bias"),
        ({"layer": 3}, "layers below"),
        ({"kv_scale": torch.ones(3, 2)}, "kv_scale"),
        ({"k_center": torch.zeros(3, 4, 32)}, "k_center"),
        ({"k_center": torch.zeros(3, 2, 32).bfloat16()}, "k_center"),
        ({"k_center": torch.zeros(3, 32, 2).mT}, "k_center"),
        ({"pool": torch.zeros(5, 3, 2, 12, 2, 32)}, "no pool"),
        ({"qkv": torch.randn(1, 2, 256), "pool": torch.zeros(5, 3, 2, 16, 2, 32).to(FP8), "dtype": None}, "named"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with backend.interpreted(), pytest.raises(ValueError, match=message):
        qkv_rope(**make_call(Shape(4, 2, 32), 2, **changes))


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="on a CPU"):
        qkv_rope(**make_call(Shape(4, 2, 32), 2))
