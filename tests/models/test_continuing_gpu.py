"""On a card, in CUDA graphs: steps beside rows that begin, end and move have the inputs that a host would have packed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.cache.block_table import BlockTable
from common.engine.gpu.continuing import Following
from common.engine.gpu.runner import DeviceRunner
from common.engine.gpu.step import DeviceStep
from common.engine.gpu.step_buffers import layout
from common.engine.load.layout import EngineConfig
from common.engine.load.runners import load_runner
from common.engine.plan import StepPlan
from common.models.source import resolve
from tests.models.test_continuing import random_steps, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def check_inputs(runner: DeviceRunner, following: Following) -> None:
    """What the device derived, once the step has run, is what packing it gives."""
    torch.cuda.synchronize()
    rows, shape = following.step.rows, following.step.shape
    own = layout(runner._buffer.cpu().numpy(), shape)
    buffer = np.zeros(len(runner._buffer), np.uint8)
    runner._packer.pack(rows, buffer, shape)
    packed = layout(buffer, shape)
    for name in ("feeds", "positions", "query_starts", "context_lens", "slots", "block_starts"):
        assert (getattr(own, name) == getattr(packed, name)).all(), name
    known = packed.feeds < 0
    assert (own.tokens[known] == packed.tokens[known]).all()
    assert (runner._sampler.draws.position[: len(rows)].cpu().numpy() == packed.positions[: len(rows)] + 1).all()
    assert (runner._tables.ids.cpu().numpy() == np.maximum(runner._tables.slots.ids, 0)).all()


def test_inputs_beside_rows_that_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    settings = {"device": "cuda", "dtype": "bfloat16", "quantization": "none"}
    engine = EngineConfig(num_blocks=600, block_tokens=16, max_running=64, token_budget=256, max_model_len=512, **settings)  # type: ignore[arg-type]
    runner = load_runner(resolve("dummy:llama-3.2-1b"), engine)
    assert isinstance(runner, DeviceRunner)
    continues = DeviceRunner._continue
    checked: list[bool] = []

    def checking(self: DeviceRunner, plan: StepPlan, following: Following, begun: float) -> DeviceStep:
        step = continues(self, plan, following, begun)
        check_inputs(self, following)
        checked.append(bool(following.given))
        return step

    monkeypatch.setattr(DeviceRunner, "_continue", checking)
    num_steps = 0
    for seed in range(20):
        plans = random_steps(seed, 16)
        if seed % 2:  # a table of more than a handful of new ids, as a long text's branch has
            for row in plans[8].rows[:1]:
                row.blocks = BlockTable([*row.blocks, *range(100, 110)])
        run(runner, plans)
        num_steps += len(plans)
    assert len(checked) > 0.7 * num_steps
    assert sum(checked) > 0.3 * num_steps
    assert any(has_given for _, has_given in runner._continuing._graphs), "no step had rows beside those that go on"
