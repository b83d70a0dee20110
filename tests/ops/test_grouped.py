"""Linears of 4 and 8 bits in groups equal their dequantised reference, interpreted: odd sizes, all codes, few and many rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.ops.backend import interpreted
from common.ops.linear import device as linear_device
from common.ops.linear.candidates import SHARED_BYTES, Candidate, Op, grouped_shared_bytes
from common.ops.linear.gate_up import gate_up
from common.ops.linear.linear import linear
from common.ops.linear.linear_tuning import tune_linears, tuned_format
from common.ops.linear.reference import linear_grouped_reference
from common.ops.linear.weight import LinearWeight, linear_from_grouped
from common.ops.quant.group_layout import Code
from common.ops.quant.grouped import codes_of, dequantise_grouped, join_grouped, pack_grouped, table_of


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PENSTOCK_KERNEL_CACHE", str(tmp_path))
    linear_device.forget_choices()
    with interpreted():
        yield
    linear_device.forget_choices()


def grouped(
    out_features: int,
    in_features: int,
    code: Code,
    group: int,
    *,
    offsets: bool = False,
    ordered: bool = False,
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[LinearWeight, torch.Tensor]:
    """A random weight, and what it means: float32 [out, in]."""
    if code == "int8":
        codes = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
        numbers = codes.float()
    else:
        codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8)
        numbers = table_of(code, codes.device)[codes.long()]
    groups = -(-in_features // group)
    scales = (torch.rand(out_features, groups) + 0.5) * (0.01 if code == "int8" else 0.1)
    added = torch.randn(out_features, groups) * 0.2 if offsets else None
    order = torch.randperm(in_features) if ordered else None
    meant = numbers * scales.repeat_interleave(group, 1)[:, :in_features]
    if added is not None:
        meant += added.repeat_interleave(group, 1)[:, :in_features]
    if order is not None:
        meant[:, order] = meant.clone()
    packed = pack_grouped(codes, scales, added, code=code, group=group, order=order)
    assert torch.equal(codes_of(packed), codes)
    return linear_from_grouped(packed, torch.randn(out_features).to(dtype) if bias else None, dtype=dtype), meant


CODES: list[tuple[Code, int, bool]] = [
    ("int4", 128, False),
    ("int4", 32, True),
    ("nf4", 64, False),
    ("fp4", 16, False),
    ("int8", 16, False),
    ("int8", 128, False),
]


@pytest.mark.parametrize(("code", "group", "offsets"), [*CODES, ("int4", 256, True), ("int4", 4096, False)])
@pytest.mark.parametrize("in_features", [256, 328])
def test_what_is_packed_is_what_was_meant(code: Code, group: int, offsets: bool, in_features: int) -> None:
    weight, meant = grouped(40, in_features, code, group, offsets=offsets, ordered=in_features == 256)
    assert weight.grouped is not None
    torch.testing.assert_close(dequantise_grouped(weight.grouped), meant, atol=2e-3, rtol=1e-3)
    joined = join_grouped([weight.grouped, weight.grouped])
    assert joined is not None
    assert torch.equal(dequantise_grouped(joined), dequantise_grouped(weight.grouped).repeat(2, 1))
    x = torch.randn(3, in_features)
    torch.testing.assert_close(linear(x, weight), (x @ meant.T).bfloat16(), atol=5e-2, rtol=2e-2)


def test_scales_of_half_precision_stay_exact() -> None:
    scales = (torch.rand(8, 2) * 1e-2).half().float()
    packed = pack_grouped(torch.full((8, 256), 9, dtype=torch.uint8), scales, None, code="int4", group=128)
    assert torch.equal(dequantise_grouped(packed)[:, ::128], scales)


@pytest.mark.parametrize("group", [24, 48, 129])
def test_other_groups_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match="can't be packed"):
        pack_grouped(torch.zeros(4, 512, dtype=torch.uint8), torch.ones(4, -(-512 // group)), None, code="int4", group=group)
    with pytest.raises(ValueError, match="have scales"):
        pack_grouped(torch.zeros(4, 512, dtype=torch.uint8), torch.ones(4, 5), None, code="int4", group=128)


def _check(op: Op, rows: int, weight: LinearWeight, meant: torch.Tensor, chosen: Candidate) -> None:
    x = torch.randn(rows, weight.in_features).to(weight.dtype)
    assert weight.grouped is not None
    order = weight.grouped.order
    y = linear_device.run(op, x if order is None else x[:, order].contiguous(), weight, chosen)
    expected = torch.nn.functional.linear(x.float(), meant, None if weight.bias is None else weight.bias.float())
    y = y.sum(0) if y.ndim == 3 else y
    torch.testing.assert_close(y.float(), expected, atol=0.12, rtol=2e-2)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(("code", "group", "offsets"), CODES)
@pytest.mark.parametrize(("rows", "size", "depth"), [(1, 40, 256), (5, 70, 300)])
def test_few_rows(code: Code, group: int, offsets: bool, rows: int, size: int, depth: int) -> None:
    weight, meant = grouped(size, depth, code, group, offsets=offsets, ordered=True, bias=True)
    for splits in (1, 2):
        for scaled in (False, True):
            chosen = Candidate("grouped", block_n=32, block_m=8, splits=splits, warps=2, scaled=scaled)
            _check("split" if splits > 1 else "wide" if scaled else "linear", rows, weight, meant, chosen)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("code", ["int4", "nf4"])
def test_many_rows_and_the_library(code: Code) -> None:
    weight, meant = grouped(200, 328, code, 64, offsets=code == "int4", bias=True)
    of_lanes = [Candidate("grouped", block_n=64, block_m=64, scaled=True, lanes=lanes) for lanes in (0, 32)]
    for chosen in (*of_lanes, Candidate("library")):
        _check("linear", 70, weight, meant, chosen)
    _check("wide", 70, weight, meant, Candidate("library"))


@pytest.mark.usefixtures("_interpreted")
def test_gate_and_up_in_one() -> None:
    weight, meant = grouped(2 * 72, 256, "int4", 128, offsets=True)
    for rows in (1, 33):
        x = torch.randn(rows, 256).bfloat16()
        gates, ups = (x.float() @ meant.T).chunk(2, 1)
        expected = torch.nn.functional.silu(gates) * ups
        error = (gate_up(x, weight).float() - expected).abs() / (expected.abs() + expected.std())
        assert error.max() < 0.03


@pytest.mark.usefixtures("_interpreted")
def test_other_dtypes_are_computed_in_themselves() -> None:
    for dtype in (torch.float32, torch.float16):
        weight, meant = grouped(48, 128, "fp4", 32, dtype=dtype)
        x = torch.randn(2, 128).to(dtype)
        torch.testing.assert_close(linear(x, weight).float(), x.float() @ meant.T, atol=2e-2, rtol=5e-3)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(("code", "offsets"), [("int4", True), ("int8", False)])
@pytest.mark.parametrize(("rows", "kind"), [(1, "grouped"), (40, "grouped"), (200, "library")])
def test_one_group_a_row_is_computed_in_float32(code: Code, offsets: bool, rows: int, kind: str) -> None:
    """GPTQ without groups and INT8: the largest tiles. What is chosen has room in an SM's shared memory, whatever the rows."""
    weight, meant = grouped(72, 384, code, 384, offsets=offsets, dtype=torch.float32)
    shape, chosen = linear_device.shape_of("linear", weight), linear_device.choose("linear", weight, rows, False)
    assert (shape.group, shape.activation_bytes, shape.offsets, chosen.kind) == (128, 4, offsets, kind)
    assert kind == "library" or grouped_shared_bytes(shape, chosen) <= SHARED_BYTES
    x = torch.randn(rows, 384)
    torch.testing.assert_close(linear(x, weight), x @ meant.T, atol=2e-2, rtol=5e-3)
    assert weight.grouped is not None
    exact = linear_grouped_reference(x, weight.grouped, None, torch.float32)
    torch.testing.assert_close(linear(x, weight), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_interpreted")
def test_a_batch_invariant_weight_has_one_kernel_for_all_batches() -> None:
    weight = replace(grouped(64, 256, "int4", 128)[0], batch_invariant=True)
    assert linear_device.choose("split", weight, 1, False) == linear_device.choose("split", weight, 300, False)


@pytest.mark.usefixtures("_interpreted")
def test_linears_in_groups_are_measured_like_others() -> None:
    weight, _ = grouped(48, 256, "int4", 128, offsets=True)
    assert tuned_format(weight) == "int4/128+offsets"
    tuned = tune_linears(
        [("int4/128+offsets", 48, 256, "output")],
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        buckets=(1,),
        measure=lambda run, launches: 1e-6 * launches,
    )
    (times,) = tuned.seconds.values()
    assert {candidate.kind for candidate in times} == {"grouped"}
    assert linear_device.choose("split", weight, 1, False) in times
