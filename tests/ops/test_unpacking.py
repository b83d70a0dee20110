"""Where the kernel that unpacks in warps of its own is a choice, on a machine without one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from common.ops import backend
from common.ops.linear import device as linear_device
from common.ops.linear.candidates import SHARED_BYTES, Candidate
from common.ops.linear.unpacking import BLOCK_N, STEP, Codes, Gate, kernel_constants
from common.ops.linear.weight import LinearWeight, linear_from_grouped
from common.ops.moe import device as experts_device
from common.ops.moe.grouped_weight import GroupedWeight
from common.ops.moe.packed_weight import PackedWeight, packed_weight
from common.ops.quant.group_layout import Code
from common.ops.quant.grouped import pack_grouped


def weight(code: Code = "int4", group: int = 128, *, size: int = 512, depth: int = 1024) -> LinearWeight:
    dtype = torch.int8 if code == "int8" else torch.uint8
    codes = torch.zeros(size, depth, dtype=dtype)
    return linear_from_grouped(pack_grouped(codes, torch.ones(size, -(-depth // group)), None, code=code, group=group))


def experts(count: int = 8, n: int = 64, k: int = 128) -> PackedWeight:
    values = torch.zeros(count, n, k // 2, dtype=torch.uint8)
    return packed_weight(GroupedWeight(values, "mxfp4", torch.full((count, n, k // 32), 127, dtype=torch.uint8)))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_warpgroup_products", lambda _device: True)


def offered(weight: LinearWeight, rows: int) -> list[Candidate]:
    return [one for one in linear_device.options("linear", weight, rows, False) if one.kind == "unpacking"]


@pytest.mark.usefixtures("hopper")
def test_many_rows_of_4_bit_weights_may_be_unpacked_apart_on_hopper() -> None:
    assert not offered(weight(), 32)
    assert {one.block_m for one in offered(weight(), 64)} == {64}
    assert {one.block_m for one in offered(weight(), 256)} == {64, 128, 256}
    assert {one.block_m for one in offered(weight(), 4096)} == {256}
    assert offered(weight("nf4", 64), 128)
    assert offered(weight("fp4", 32), 128)
    assert not offered(weight("fp4", 16), 128)  # two groups a run
    assert not offered(weight("int8"), 128)
    assert not offered(weight(depth=1028), 128)  # rows of activations that are no multiple of 16 bytes
    assert not offered(replace(weight(), dtype=torch.float32), 128)


@pytest.mark.usefixtures("hopper")
def test_what_is_chosen_unmeasured_stays_what_it_is() -> None:
    assert linear_device.options("linear", weight(), 2048, False)[0].kind != "unpacking"
    assert not experts_device.options(experts(), 4096, 2)[0].unpacking


@pytest.mark.usefixtures("hopper")
def test_splits_fill_a_gpu_that_tiles_do_not() -> None:
    few = {one.splits for one in offered(weight(size=128, depth=8192), 64)}
    assert len(few) > 1
    gated = [one for one in linear_device.options("gated", weight(), 256, False) if one.kind == "unpacking"]
    assert {one.splits for one in gated} == {1}


@pytest.mark.usefixtures("hopper")
def test_experts_with_many_pairs_may_be_unpacked_apart_on_hopper() -> None:
    sizes = {
        rows: {one.block_m for one in experts_device.options(experts(), rows, 2) if one.unpacking} for rows in (64, 128, 4096)
    }
    assert sizes == {64: set(), 128: {64}, 4096: {128, 256}}
    assert not any(one.unpacking for one in experts_device.options(experts(), 4096, 2, torch.float32))
    assert not any(one.unpacking for one in experts_device.options(experts(n=56), 4096, 2))  # 28 columns behind the gate


def test_nothing_is_offered_elsewhere() -> None:
    assert not offered(weight(), 256)
    assert not any(one.unpacking for one in experts_device.options(experts(), 4096, 2))


@pytest.mark.parametrize("rows", [64, 128, 256])
@pytest.mark.parametrize("run", [32, 64, 128])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gate", [None, Gate()])
def test_steps_fit_shared_memory(rows: int, run: int, offsets: bool, dtype: torch.dtype, gate: Gate | None) -> None:
    nothing = torch.empty(1, dtype=torch.int32)
    codes = Codes(nothing, nothing, nothing if offsets else None, None, None, 0, False, run, 128)
    found = kernel_constants(codes, dtype, rows, gate)
    assert found["X_STAGES"] >= found["W_STAGES"] >= 2
    steps = (found["W_STAGES"] * BLOCK_N + found["X_STAGES"] * rows) * STEP * 2
    words = (2 if run == 32 else 1) * (1 + offsets)
    assert steps + found["UNPACKERS"] * found["AHEAD"] * BLOCK_N * (64 + 4 * words) < SHARED_BYTES
