"""Steps that continue the one before, beside rows that begin or end, are not packed, and give what packed ones give."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from typing import Any

import pytest

from common.cache.block_table import BlockTable
from common.engine.gpu import continuing
from common.engine.gpu.runner import DeviceRunner
from common.engine.plan import UNKNOWN, BlockCopy, RowSamples, StepPlan, StepResult, StepRow
from common.models.source import ModelFiles
from common.protocol.errors import InvalidParameter
from common.protocol.messages import SamplingParams
from tests.fixtures.slow import some_slow
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
    advance, advance_with_given = continuing.advance_rows, continuing.advance_with_given

    def counted(inputs: Any) -> None:
        advance(inputs)
        seen.append(int((inputs.slots[0] >= 0).sum()))

    def counted_with_given(inputs: Any, given: Any) -> None:
        advance_with_given(inputs, given)
        seen.append(int((inputs.slots[0] >= 0).sum()))

    monkeypatch.setattr(continuing, "advance_rows", counted)
    monkeypatch.setattr(continuing, "advance_with_given", counted_with_given)
    return seen


@pytest.mark.parametrize(
    ("params", "steps", "leaves", "expected"),
    [
        pytest.param([GREEDY, SAID], 4, 99, [2] * 3, id="greedy"),
        pytest.param([FREE, FILTERED, GREEDY], 6, 4, [3, 3, 2, 2, 2], id="one leaves", marks=pytest.mark.slow),
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


def random_steps(seed: int, num_steps: int) -> list[StepPlan]:
    """Up to six rows that begin behind a token, go on, go back to a known token, move to other places, or end."""
    rng = random.Random(seed)
    texts = [(BlockTable([8 * text]), rng.choice([GREEDY, SAID, FREE, FILTERED])) for text in range(6)]
    at: dict[int, int] = {}
    before: list[int] = []
    plans: list[StepPlan] = []
    for step in range(num_steps):
        present = [text for text in before if rng.random() < 0.9]
        present += [text for text in range(6) if text not in present and rng.random() < 0.15]
        if rng.random() < 0.2:
            rng.shuffle(present)
        present = present or [0]
        rows: list[StepRow] = []
        for text in present:
            table, sampling = texts[text]
            goes_on = text in before and rng.random() < 0.9
            start = at[text] + 1 if goes_on else rng.randrange(at[text] + 2) if text in at else 0
            at[text] = start
            while len(table) * 16 <= start:
                table.append(8 * text + len(table))
            tokens, feed = ([UNKNOWN], before.index(text)) if goes_on else ([rng.randrange(60)], -1)
            rows.append(StepRow(tokens, start, table, 1, sampling, 1, feed=feed))
        copies = [BlockCopy(0, 8 * present[0], 60)] if rng.random() < 0.1 else []
        plans.append(StepPlan(step, rows, copies))
        before = present
    return plans


@pytest.mark.parametrize(("seed", "num_steps"), some_slow([(1, 8), *((seed, 16) for seed in range(1, 8))], quick=[(1, 8)]))
def test_other_rows_beside_those_that_go_on(
    llama: tuple[Any, ModelFiles], advanced: list[int], seed: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities differ in their last bits, since the step has room for more rows than a packed one would."""
    found = run(device_runner(llama[1]), random_steps(seed, num_steps))
    assert len(advanced) > num_steps // 3
    num_advanced = len(advanced)
    monkeypatch.setattr(continuing.Continuing, "follow", lambda *_: None)
    packed = run(device_runner(llama[1]), random_steps(seed, num_steps))
    assert len(advanced) == num_advanced, "the other runner advances none"
    for own, other in zip(found, packed, strict=True):
        assert [row.tokens for row in own.rows] == [row.tokens for row in other.rows]
        for one, two in zip(own.rows, other.rows, strict=True):
            for said, expected in zip(one.logprobs or [], two.logprobs or [], strict=True):
                assert said.top_tokens == expected.top_tokens
                assert said.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-4)


def run(runner: DeviceRunner, plans: list[StepPlan]) -> list[StepResult]:
    """Each is submitted before the one before it has ended."""
    results: list[StepResult] = []
    last: Any = None
    for plan in plans:
        pending = runner.submit(plan)
        if last is not None:
            results.append(last.result())
        last = pending
    return [*results, last.result()]


@pytest.mark.slow
def test_a_shape_that_is_too_large_is_left(llama: tuple[Any, ModelFiles], advanced: list[int]) -> None:
    """Two rows of four: after some steps the two have a step of their own size."""
    runner, tables = device_runner(llama[1]), [BlockTable([index]) for index in range(4)]

    def step(number: int, count: int, feed: bool) -> None:
        rows = [
            StepRow([UNKNOWN] if feed else [5], number, tables[index], 1, GREEDY, 1, feed=index if feed else -1)
            for index in range(count)
        ]
        runner.execute(StepPlan(number, rows))

    step(0, 4, False)
    for number in range(1, 15):
        step(number, 2, True)
    assert len(advanced) == 13, "eight steps in the shape of four rows, one that is packed, and five behind it"


@pytest.mark.parametrize("change", ["tokens", "penalty", "token", "hole", "room"])
def test_what_does_not_continue_is_packed(
    llama: tuple[Any, ModelFiles], advanced: list[int], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, table = device_runner(llama[1]), BlockTable([3])
    runner.execute(StepPlan(0, [StepRow([7], 14, table, 1, GREEDY, 1)]))
    row = StepRow([UNKNOWN], 15, table, 1, GREEDY, 1, feed=0)
    error = ""
    match change:
        case "tokens":
            row.tokens = [UNKNOWN, 4]
            table.append(5)
        case "penalty":
            row.sampling, row.history = PENALISED, [7] * 15 + [UNKNOWN]
        case "token":
            row.feed, row.tokens, error = -1, [1 << 30], "vocabulary"
        case "hole":
            row.start, row.blocks, error = 20, BlockTable([3, -1]), "hole"
        case _:
            runner.execute(StepPlan(1, [row]))
            assert advanced == [1]
            with pytest.raises(InvalidParameter, match="hold"):
                runner.execute(StepPlan(2, [StepRow([UNKNOWN], 16, table, 1, GREEDY, 1, feed=0)]))
            return
    with pytest.raises(InvalidParameter, match=error) if error else contextlib.nullcontext():
        runner.execute(StepPlan(1, [row]))
    assert advanced == []
