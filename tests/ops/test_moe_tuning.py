"""Experts are computed as was measured when the model was loaded, else by the default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.ops.moe import device as experts_device
from common.ops.moe import experts_triton as kernels
from common.ops.moe.candidates import (
    DIRECT_PAIRS,
    ROW_BUCKETS,
    SHARED_BYTES,
    ExpertCandidate,
    ExpertShape,
    candidates,
    invariant_candidate,
)
from common.ops.moe.experts_tuning import TunedExperts, tune_experts
from common.ops.moe.form import ExpertActivation
from common.ops.moe.grouped_weight import GroupedWeight
from common.ops.moe.packed_weight import packed_weight

SHAPES = [
    ExpertShape(128, 2880, 2880, 4, "mxfp4", 32),
    ExpertShape(32, 2880, 2880, 4, "mxfp4", 32),
    ExpertShape(128, 2048, 768, 8, "plain"),
    ExpertShape(128, 2048, 768, 8, "fp8_blocks"),
    ExpertShape(8, 4096, 14336, 2, "int4", 128),
]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PENSTOCK_KERNEL_CACHE", str(tmp_path))
    experts_device.forget_choices()
    yield
    experts_device.forget_choices()
    experts_device.TABLE.open(torch.device("cpu"))


def _layer(top_k: int = 2) -> TunedExperts:
    made = torch.Generator().manual_seed(0)
    gate_up = GroupedWeight(torch.randn(4, 64, 32, generator=made).bfloat16())
    down = GroupedWeight(torch.randn(4, 32, 32, generator=made).bfloat16())
    return TunedExperts(packed_weight(gate_up), packed_weight(down), ExpertActivation(), top_k, torch.bfloat16)


def test_the_fastest_is_chosen_for_a_bucket_and_survives_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    ran: list[ExpertCandidate] = []

    def noting(*given: Any) -> torch.Tensor:
        ran.append(given[-1])
        return torch.ones(1)

    monkeypatch.setattr(kernels, "experts_triton", noting)

    def measure(launch: Callable[[int], object], launches: int) -> float:
        launch(0)
        return 1.0 if ran[-1].block_n == 128 else 2.0

    layer = _layer()
    tuned = tune_experts([layer, layer], buckets=(1, 16), measure=measure)
    assert len(tuned.seconds) == 2
    assert not tuned.failed
    for rows in (1, 9, 16):
        assert experts_device.choose(layer.gate_up, layer.activation, rows, 2).block_n == 128
    assert experts_device.choose(layer.gate_up, layer.activation, 300, 2) == experts_device.options(layer.gate_up, 512, 2)[0]
    ran.clear()
    assert not tune_experts([layer], buckets=(1, 16), measure=measure).seconds
    assert not ran


def test_no_shape_is_begun_when_the_budget_is_spent() -> None:
    layer = _layer()
    assert not tune_experts([layer], buckets=(1,), budget_s=-1.0, measure=lambda run, launches: 1.0).seconds
    assert experts_device.choose(layer.gate_up, layer.activation, 1, 2) == experts_device.options(layer.gate_up, 1, 2)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_candidates_are_few_different_and_fit_a_multiprocessor(shape: ExpertShape) -> None:
    kernels_of: set[ExpertCandidate] = set()
    for rows in ROW_BUCKETS:
        found = candidates(shape, rows, 132)
        assert 1 <= len(found) == len(set(found)) <= 14
        kernels_of |= set(found)
        for chosen in (*found, invariant_candidate(shape)):
            assert not chosen.direct or rows * shape.top_k <= DIRECT_PAIRS
            assert chosen.splits == 1 or rows * shape.top_k <= 16 * shape.experts
            columns = chosen.block_k or (128 if shape.values == "mxfp4" else 2 * shape.run)
            weights = chosen.block_n * columns * (1 if shape.values.startswith("fp8") else 2) // (4 if shape.run else 1)
            assert chosen.stages * (weights + chosen.block_m * columns) <= SHARED_BYTES
    assert len(kernels_of) <= 60, "each is compiled when a model is loaded for the first time"
