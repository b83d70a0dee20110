"""A request whose logits are not finite gets no token, and nobody beside it notices; on both devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.gpu.runner import DeviceRunner
from common.engine.layer_group import LayerGroup
from common.engine.plan import NO_TOKEN, StepPlan, StepRow
from common.models.config import load_config
from common.models.registry import load_decoder
from common.ops.backend import interpreted
from common.ops.linear.candidates import Candidate
from common.protocol.messages import SamplingParams
from tests.models.driver import open_runner
from tests.models.oracles import build, save
from tests.ops.interpreter import act_as_a_gpu

BAD = 77
"""A token whose embedding is not finite."""

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about what is not finite

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3, logprobs=2),
    SamplingParams(temperature=1.2, seed=4, top_k=7),
    SamplingParams(temperature=0.7, seed=6, presence_penalty=0.5),
)


@pytest.fixture(params=["cpu", "int8 nan", "int8 inf", "device"])
def runner(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    files = save(build("llama-untied-biases"), tmp_path)
    if request.param != "device":
        is_int8 = request.param != "cpu"
        runner = open_runner(files, dtype="auto", threads=2) if is_int8 else open_runner(files)
        runner.decoder.embedding[BAD] = torch.inf if request.param == "int8 inf" else torch.nan  # type: ignore[attr-defined]
        yield runner
        return
    monkeypatch.setattr("common.ops.linear.device._choose", lambda *_: Candidate("library"))
    act_as_a_gpu()
    with interpreted():
        model = load_config(files)
        decoder = load_decoder(files, model, dtype=torch.float32, device=torch.device("cpu"))
        decoder.embedding[BAD] = torch.inf
        pool = torch.zeros(32, model.num_layers, 2, 16, model.num_kv_heads, model.head_dim)
        yield DeviceRunner(
            decoder, [LayerGroup(pool, range(model.num_layers))], fingerprint="test", max_rows=16, token_budget=64
        )


def test_only_the_request_itself_has_no_token(runner: Any) -> None:
    def rows(token: int) -> list[StepRow]:
        prompts = [[3, 4, 5], [token, 9, 8], [6, 7]]
        found: list[StepRow] = []
        for index, params in enumerate((*KINDS, *KINDS[:2])):
            prompt = prompts[index % 3]
            found.append(StepRow(list(prompt), 0, [index], 1, params, len(prompt), list(prompt)))
        return found

    well = runner.execute(StepPlan(0, rows(10))).rows
    found = runner.execute(StepPlan(1, rows(BAD))).rows
    for index, (one, other) in enumerate(zip(found, well, strict=True)):
        assert one.tokens == ([NO_TOKEN] if index % 3 == 1 else other.tokens)
        if index % 3 != 1:
            assert one.logprobs == other.logprobs
    assert runner.execute(StepPlan(2, rows(10))).rows == well  # nothing is left behind


def test_a_step_fed_by_no_token_runs(runner: Any) -> None:
    if runner.run_ahead == 1:
        pytest.skip("it never runs ahead")
    row = StepRow([BAD], 0, [0], 1, KINDS[0], 1)
    later = StepRow([-1], 1, [0], 1, KINDS[0], 1, feed=0)
    other = StepRow([5, 6], 0, [1], 1, KINDS[0], 2)
    first, second = runner.submit(StepPlan(0, [row])), runner.submit(StepPlan(1, [later, other]))
    assert first.result().rows[0].tokens == [NO_TOKEN]
    assert second.result().rows[0].tokens == [NO_TOKEN]
    assert second.result().rows[1].tokens == runner.execute(StepPlan(2, [other])).rows[0].tokens
