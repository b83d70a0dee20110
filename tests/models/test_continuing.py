"""Steps that continue the one before are not packed, and give what packed ones give."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from common.cache.block_table import BlockTable
from common.engine.gpu import continuing
from common.engine.gpu.runner import DeviceRunner
from common.engine.plan import UNKNOWN, RowSamples, StepPlan, StepRow
from common.models.source import ModelFiles
from common.protocol.errors import InvalidParameter
from common.protocol.messages import SamplingParams
from tests.models.driver import GREEDY
from tests.models.oracles import oracle_prompt
from tests.models.test_device_runner import device_runner

pytestmark = pytest.mark.usefixtures("kernels")

FREE = SamplingParams(temperature=0.9, seed=11)
FILTERED = SamplingParams(temperature=1.1, top_k=5, seed=12)
SAID = SamplingParams(temperature=0.0, logprobs=3)
PENALISED = SamplingParams(temperature=0.0, presence_penalty=0.5)


def decode(runner: DeviceRunner, params: list[SamplingParams], steps: int, *, leaves: int = 99) -> list[list[RowSamples]]:
    """Prompts, then `steps` steps of one token a row, each submitted before the one before it has ended. Tables grow when they
    must. leaves: the step from which on the first row is gone."""
    tables = [BlockTable([4 * index]) for index in range(len(params))]
    found: list[list[RowSamples]] = [[] for _ in params]
    pending: deque[Any] = deque()
    before: list[int] = []
    for step in range(steps + 1):
        present = [index for index in range(len(params)) if index or step < leaves]
        rows = []
        for index in present:
            prompt = oracle_prompt(seed=index, length=13 + index)
            start = len(prompt) + step - 1 if step else 0
            end = start + 1 if step else len(prompt)
            while len(tables[index]) * 16 < end:
                tables[index].append(4 * index + len(tables[index]))
            tokens = [UNKNOWN] if step else prompt
            history = [*prompt, *[0] * step] if params[index] is PENALISED else []
            feed = before.index(index) if step else -1
            rows.append(StepRow(tokens, start, tables[index], 1, params[index], len(prompt), history, feed=feed))
        pending.append((present, runner.submit(StepPlan(step, rows))))
        before = present
        while len(pending) > (step < steps):
            who, result = pending.popleft()
            for index, row in zip(who, result.result().rows, strict=True):
                found[index].append(row)
    return found


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step that was advanced on the device."""
    seen: list[int] = []
    advance = continuing.advance_rows

    def counted(inputs: Any) -> None:
        seen.append(int((inputs.slots[0] >= 0).sum()))
        advance(inputs)

    monkeypatch.setattr(continuing, "advance_rows", counted)
    return seen


@pytest.mark.parametrize(
    ("params", "steps", "leaves", "expected"),
    [
        pytest.param([GREEDY, SAID], 4, 99, [2] * 3, id="greedy"),
        pytest.param([FREE, FILTERED, GREEDY], 6, 4, [3, 3, 2, 2], id="one leaves", marks=pytest.mark.slow),
        pytest.param([GREEDY, PENALISED], 6, 99, [], id="penalised", marks=pytest.mark.slow),
    ],
)
def test_steps_that_continue_give_what_packed_ones_give(
    llama: tuple[Any, ModelFiles],
    advanced: list[int],
    params: list[SamplingParams],
    steps: int,
    leaves: int,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = decode(device_runner(llama[1]), params, steps, leaves=leaves)
    assert advanced == expected
    monkeypatch.setattr(continuing.Continuing, "follow", lambda *_: None)
    packed = decode(device_runner(llama[1]), params, steps, leaves=leaves)
    assert len(advanced) == len(expected), "the other runner advances none"
    assert found == packed


def test_a_step_that_could_not_be_launched_is_not_continued(
    llama: tuple[Any, ModelFiles], advanced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, table = device_runner(llama[1]), BlockTable([3])

    def row(start: int, feed: int = 0) -> StepRow:
        return StepRow([UNKNOWN] if feed >= 0 else [7], start, table, 1, GREEDY, 1, feed=feed)

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("no launch")

    for start in range(3):
        runner.execute(StepPlan(start, [row(start, -1 if start == 0 else 0)]))
    assert advanced == [1, 1]
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="no launch"):
        patched.setattr(runner.decoder, "states", fails)
        runner.execute(StepPlan(3, [row(3)]))
    runner.execute(StepPlan(3, [row(3)]))
    assert advanced == [1, 1, 1], "the failed one had advanced; the next was packed"


@pytest.mark.parametrize("change", ["start", "feed", "sampling", "tokens", "table", "room"])
def test_what_does_not_continue_is_packed(
    llama: tuple[Any, ModelFiles], advanced: list[int], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, table = device_runner(llama[1]), BlockTable([3])
    runner.execute(StepPlan(0, [StepRow([7], 14, table, 1, GREEDY, 1)]))
    row = StepRow([UNKNOWN], 15, table, 1, GREEDY, 1, feed=0)
    match change:
        case "start":
            row.start = 14
        case "feed":
            row.feed, row.tokens = -1, [9]
        case "sampling":
            row.sampling = SamplingParams(temperature=0.0, seed=5)
        case "tokens":
            row.tokens = [UNKNOWN, 4]
            table.append(5)
        case "table":
            row.blocks = BlockTable([3])
        case _:
            runner.execute(StepPlan(1, [row]))
            assert advanced == [1]
            with pytest.raises(InvalidParameter, match="hold"):
                runner.execute(StepPlan(2, [StepRow([UNKNOWN], 16, table, 1, GREEDY, 1, feed=0)]))
            return
    runner.execute(StepPlan(1, [row]))
    assert advanced == []
