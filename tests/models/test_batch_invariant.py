"""The setting `batch_invariant` reaches whatever chooses a kernel: each linear, the experts, attention, the KV writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.engine.gpu import step_attention
from common.engine.load.layout import EngineConfig
from common.engine.load.runners import _decoder
from common.engine.plan import StepPlan, StepRow
from common.models.attention import DeviceAttention
from common.models.blocks.moe import ExpertsBlock
from common.models.config import load_config
from common.models.decoder import Decoder
from common.models.source import ModelFiles
from common.ops.attention.settings import AttentionSettings
from common.ops.backend import interpreted
from common.ops.linear.candidates import Candidate
from common.ops.linear.weight import LinearWeight
from common.ops.moe.packed_weight import PackedWeight
from tests.models import test_device_runner, test_weights_experts, test_weights_groups
from tests.models.driver import GREEDY
from tests.models.oracles import build, oracle_prompt, save
from tests.ops.interpreter import act_as_a_gpu


def checkpoint(name: str, folder: Path) -> ModelFiles:
    if name in test_weights_groups.FORMATS:
        return test_weights_groups.Checkpoint(folder, name).files
    if name in test_weights_experts.CASES:
        return test_weights_experts.Checkpoint(folder, name).files
    return save(build(name), folder)


def weights(decoder: Decoder) -> list[LinearWeight | PackedWeight]:
    found: list[LinearWeight | PackedWeight] = [weight for _, weight in decoder.linears]
    for layer in decoder.layers:
        if isinstance(layer.mlp, ExpertsBlock):
            assert layer.mlp.weights.on_gpu is not None
            found += [layer.mlp.router, *layer.mlp.weights.on_gpu, *(layer.mlp.shared or ())]
    return found


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize(
    "name", ["llama", "llama4", "awq", "gptq-act-order", "qwen3-moe-fp8", "qwen3-moe-packed", "gpt-oss-mxfp4", "mixtral-nf4"]
)
def test_every_weight_knows_the_engines_setting(tmp_path: Path, name: str, batch_invariant: bool) -> None:
    files = checkpoint(name, tmp_path)
    engine = EngineConfig(device="cpu", dtype="float32", quantization="none", batch_invariant=batch_invariant)
    act_as_a_gpu()
    with interpreted():
        decoder, _, _ = _decoder(files, load_config(files), engine, "cpu", None)
    assert {weight.batch_invariant for weight in weights(decoder)} == {batch_invariant}


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_step_writes_kv_and_attends_as_the_runner_was_told(
    tmp_path: Path, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[DeviceAttention] = []

    def seen(*given: Any) -> DeviceAttention:
        made.append(DeviceAttention(*given))
        return made[-1]

    monkeypatch.setattr("common.ops.linear.device._choose", lambda *_: Candidate("library"))
    monkeypatch.setattr(step_attention, "DeviceAttention", seen)
    act_as_a_gpu()
    with interpreted():
        settings = AttentionSettings(batch_invariant=batch_invariant)
        runner = test_device_runner.device_runner(save(build("llama"), tmp_path), attention=settings)
        runner.execute(StepPlan(0, [StepRow(oracle_prompt()[:5], 0, [0], 1, GREEDY, 5)]))
    assert {attention.target.batch_invariant for attention in made} == {batch_invariant}
    plans = [plan for attention in made for plan in attention.plans.values()]
    assert {plan.settings.batch_invariant for plan in plans} == {batch_invariant}
    assert all(work.config.segment_keys > 0 for plan in plans for work in plan.lists) == batch_invariant
