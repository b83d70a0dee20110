"""Which shapes the kernel for few rows of weights in groups takes, and how it cuts them."""

from __future__ import annotations

import pytest

from common.ops.linear.candidates import Op, Shape
from common.ops.linear.streaming import is_fastest, streaming_candidates

SMS = 132


def shape(op: Op, n: int, k: int, group: int = 128) -> Shape:
    return Shape(op, n, k, 1, "none", group=group, bits=4, offsets=True, integers=True)


@pytest.mark.parametrize(
    ("op", "n", "k"), [("split", 6144, 4096), ("split", 4096, 4096), ("gated", 28672, 4096), ("split", 4096, 14336)]
)
def test_linears_of_8b_have_candidates_that_is_fastest(op: Op, n: int, k: int) -> None:
    found = streaming_candidates(shape(op, n, k), 1, SMS)
    assert found
    assert is_fastest(shape(op, n, k), SMS)
    first = found[0]
    assert 8 <= n / 16 * first.parts * first.splits / SMS <= 16
    assert all(k // 256 % (one.stages * one.parts * one.splits) == 0 for one in found)  # whole turns for every warp
    assert all(one.warps % one.parts == 0 for one in found)


@pytest.mark.parametrize(("rows", "in_bytes"), [(1, {False, True}), (4, {False, True}), (8, {False}), (16, {False})])
def test_few_rows_multiply_integers_as_bytes(rows: int, in_bytes: set[bool]) -> None:
    found = streaming_candidates(shape("gated", 28672, 4096), rows, SMS)
    assert {one.in_bytes for one in found} == in_bytes
    floats = streaming_candidates(shape("gated", 28672, 4096)._replace(integers=False), rows, SMS)
    assert {one.in_bytes for one in floats} == {False}


def test_bytes_that_no_program_has_room_for_are_left_out() -> None:
    wide = shape("gated", 28672, 8192)
    assert any(one.in_bytes for one in streaming_candidates(wide, 2, SMS))
    assert not any(one.in_bytes for one in streaming_candidates(wide, 4, SMS))


def test_a_gated_product_is_never_in_partial_sums() -> None:
    assert {one.splits for one in streaming_candidates(shape("gated", 28672, 4096), 8, SMS)} == {1}


@pytest.mark.parametrize(
    "other",
    [
        shape("split", 4096, 4096, group=32),
        shape("split", 4096, 4096 + 128),  # half a step
        shape("gated", 4096 + 16, 4096),  # half a tile of the gate's rows
        shape("split", 4096, 4096)._replace(bits=8),
        shape("split", 4096, 4096)._replace(activation_bytes=4),
        shape("split", 256, 4096),  # too few for so many multiprocessors
    ],
)
def test_other_shapes_are_left_to_other_kernels(other: Shape) -> None:
    assert not streaming_candidates(other, 1, SMS)


def test_more_rows_than_twice_the_columns_of_a_product_are_left_to_other_kernels() -> None:
    assert streaming_candidates(shape("split", 4096, 4096), 16, SMS)
    assert not streaming_candidates(shape("split", 4096, 4096), 32, SMS)


def test_steps_under_way_are_what_there_are_registers_for() -> None:
    """In bytes, in bf16 of eight rows and of sixteen."""
    for group, stages in ((128, (2, 1, 1)), (64, (3, 3, 2))):
        given = shape("gated", 28672, 4096, group)
        few, many = streaming_candidates(given, 4, SMS), streaming_candidates(given, 16, SMS)
        assert {one.stages for one in few if one.in_bytes} == {stages[0]}
        assert {one.stages for one in few if not one.in_bytes} == {stages[1]}
        assert {one.stages for one in many} == {stages[2]}


def test_a_large_weight_is_measured_beside_other_kernels() -> None:
    assert not is_fastest(shape("gated", 57344, 8192), SMS)
    assert not is_fastest(shape("gated", 28672, 4096, group=64), SMS)
    assert streaming_candidates(shape("gated", 57344, 8192), 1, SMS)
