"""Where the warp-specialised kernel for gate and up is a choice, on a machine without one."""

from __future__ import annotations

import pytest
import torch

from bench.engine.in_turns import without
from common.ops import backend
from common.ops.linear import device as linear_device
from common.ops.linear.candidates import SHARED_BYTES, Candidate, Op
from common.ops.linear.specialised import specialised_candidates
from common.ops.linear.weight import LinearWeight


def weight(dtype: torch.dtype = torch.bfloat16, *, size: int = 512, depth: int = 1024) -> LinearWeight:
    return LinearWeight(torch.empty(0, dtype=dtype), None, depth, 2 * size, "plain", dtype=dtype)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_warpgroup_products", lambda _device: True)
    monkeypatch.setattr(backend, "num_sms", lambda _device: 132)


def offered(weight: LinearWeight, rows: int, *, op: Op = "gated") -> list[Candidate]:
    return [one for one in linear_device.options(op, weight, rows, False) if one.kind == "specialised"]


@pytest.mark.usefixtures("hopper")
def test_gate_and_up_of_many_rows_on_hopper() -> None:
    assert not offered(weight(), 512)
    assert {(one.block_m, one.block_n) for one in offered(weight(), 4096)} == {(128, 256), (192, 256)}
    assert not offered(weight(depth=1028), 4096)  # rows that are no multiple of 16 bytes
    assert not offered(weight(torch.float32), 4096)
    assert not offered(weight(torch.float16), 4096)
    assert not offered(weight(), 4096, op="split")


@pytest.mark.usefixtures("hopper")
def test_what_is_chosen_unmeasured_stays_what_it_is() -> None:
    assert linear_device.options("gated", weight(), 2048, False)[0].kind != "specialised"


@pytest.mark.usefixtures("hopper")
def test_the_benchmark_compares_it_with_the_first_of_another_kind() -> None:
    own, other = offered(weight(), 4096)[0], Candidate("persistent")
    first = linear_device.options("gated", weight(), 4096, False)[0]
    assert without("specialised", lambda *_: own)("gated", weight(), 4096, False) == first != own
    assert without("specialised", lambda *_: other)("gated", weight(), 4096, False) is other


def test_other_gpus_have_it_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_warpgroup_products", lambda _device: False)
    monkeypatch.setattr(backend, "num_sms", lambda _device: 132)
    assert not offered(weight(), 4096)


def test_steps_and_what_turns_results_fit_into_shared_memory() -> None:
    for one in specialised_candidates(linear_device.shape_of("gated", weight()), 4096):
        steps = one.stages * (one.block_m + one.block_n) * one.block_k * 2
        turned = one.block_m * one.block_n // 2 * 2
        assert steps + turned + 1024 <= SHARED_BYTES
