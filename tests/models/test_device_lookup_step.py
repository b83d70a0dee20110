"""A step verifies what lookup on the device has just written into it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from bench.engine import lookup as bench
from common.engine.gpu.runner import DeviceRunner
from common.engine.plan import StepPlan
from common.ops.backend import interpreted
from common.ops.linear.candidates import Candidate
from tests.models.oracles import build, save
from tests.models.test_device_runner import device_runner
from tests.ops.interpreter import act_as_a_gpu


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[DeviceRunner]:
    """With KV of some text in all blocks."""
    monkeypatch.setattr("common.ops.linear.device._choose", lambda *_: Candidate("library"))
    act_as_a_gpu()
    torch.manual_seed(1)
    with interpreted():
        runner = device_runner(save(build("llama-wide-heads"), tmp_path))
        for group in runner.groups:
            group.pool.normal_()
        yield runner


def test_a_step_computes_the_proposals_of_the_device(runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench.Case(rows=2, context=400, room=3, capacity=512, steps=2)
    plan = bench.plan_of(case, runner)
    texts = bench.filled(case, runner.groups[0].pool.device)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_settle", bench.following(case, runner, texts))
        found = runner.execute(plan)
    proposals = texts.proposals[:, : case.room].tolist()
    assert texts.lengths.tolist() == [case.context + 1] * 2
    assert texts.found[:, 0].tolist() == [case.room] * 2
    rows = [
        msgspec.structs.replace(row, tokens=[row.tokens[0], *proposal])
        for row, proposal in zip(plan.rows, proposals, strict=True)
    ]
    plain = runner.execute(plan)
    wanted = runner.execute(StepPlan(2, rows))
    assert [row.tokens for row in found.rows] == [row.tokens for row in wanted.rows]
    assert [row.tokens for row in found.rows] != [row.tokens for row in plain.rows], "the proposals change what is sampled"


def test_the_benchmark_refuses_more_rows_than_there_is_kv_for(runner: DeviceRunner) -> None:
    with pytest.raises(ValueError, match="don't fit"):
        bench.plan_of(bench.Case(rows=10_000, context=40, room=3, capacity=128, steps=2), runner)
