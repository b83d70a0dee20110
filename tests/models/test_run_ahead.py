"""A GPU runs a step long after it was submitted: what the host writes meanwhile must be another step's memory.

Stands in for a GPU with a queue: every copy and launch of a step waits until somebody waits for that step. Whoever overwrites
pinned memory that a step in the queue has still to read, or reads what it has still to write, gets other tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bench.engine.driver import Driver, Request
from common.engine.gpu import runner as device
from common.engine.gpu.step import DeviceStep
from common.engine.plan import StepPlan, StepResult
from common.models.source import ModelFiles
from common.ops.backend import interpreted
from common.ops.linear.candidates import Candidate
from common.protocol.messages import SamplingParams
from tests.models.driver import open_runner
from tests.models.oracles import build, oracle_prompt, save
from tests.models.test_device_runner import device_runner
from tests.ops.interpreter import act_as_a_gpu

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.2, seed=4, top_k=7),
    SamplingParams(temperature=0.0, logit_bias={3: 8.0}, min_tokens=3, stop_token_ids=[3, 118]),
]


class Later:
    """A tensor that copies go to when their turn comes; views of it likewise."""

    def __init__(self, tensor: torch.Tensor, queue: deque[Callable[[], object]]) -> None:
        self._tensor, self._queue = tensor, queue

    def __getitem__(self, index: Any) -> Later:
        return Later(self._tensor[index], self._queue)

    def __len__(self) -> int:
        return len(self._tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Later:
        self._queue.append(lambda: self._tensor.copy_(source))
        return self

    def scatter_(self, dim: int, index: torch.Tensor, source: torch.Tensor) -> Later:
        """index, source: views of memory that is read later."""
        self._queue.append(lambda: self._tensor.scatter_(dim, index, source))
        return self


class QueuedRunner:
    """`runner`, whose device works off its queue, up to a step, when that step's result is asked for."""

    def __init__(self, runner: Any) -> None:
        self.run_ahead, self.max_context = runner.run_ahead, runner.max_context
        self.block_tokens, self.num_blocks = runner.block_tokens, runner.num_blocks
        self._runner = runner
        self._queue: deque[Callable[[], object]] = deque()
        sampler = runner._sampler
        forward, finish, load, previous = runner._forward, sampler.finish, sampler.draws.load, sampler._previous
        logits: list[torch.Tensor] = []

        def end(rows: Any, masks: Any, turn: int) -> None:
            later, sampler._previous = sampler._previous, previous
            now, sampler._turn = sampler._turn, turn
            finish(logits.pop(), rows, masks)
            sampler._previous, sampler._turn = later, now

        tables = runner._tables
        now, later = tables.ids, Later(tables.ids, self._queue)
        apply = tables.apply

        def apply_later(upload: Later) -> None:
            tables.ids = later
            apply(upload)
            tables.ids = now

        tables.apply = apply_later
        runner._buffer = Later(runner._buffer, self._queue)
        runner._tokens = [Later(tokens, self._queue) for tokens in runner._tokens]
        runner._forward = lambda shape, rows, read, **_: self._queue.append(lambda: logits.append(forward(shape, rows, read)))
        sampler.finish = lambda _, rows, masks: self._queue.append(lambda turn=sampler._turn: end(rows, masks, turn))
        sampler._previous = Later(previous, self._queue)
        object.__setattr__(sampler.draws, "load", lambda host: self._queue.append(lambda: load(host)))

    def submit(self, plan: StepPlan) -> Step:
        return Step(self._runner.submit(plan), self._queue)


class Step:
    def __init__(self, step: DeviceStep, queue: deque[Callable[[], object]]) -> None:
        self._step, self._queue = step, queue
        self._has_run = False
        queue.append(self._end)

    def _end(self) -> None:
        self._has_run = True

    def result(self) -> StepResult:
        with torch.inference_mode():
            while not self._has_run:
                self._queue.popleft()()
        return self._step.result()


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("common.ops.linear.device._choose", lambda *_: Candidate("library"))
    act_as_a_gpu()
    with interpreted():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return save(build("llama"), tmp_path_factory.mktemp("llama"))


def generate(runner: Any) -> list[list[int]]:
    """Four requests, two at a time, prompts in pieces; blocks go to the next one while the last step is still queued."""
    requests = [Request(oracle_prompt(seed=i, length=3 + 5 * i), 2 + i % 2, PARAMS[i]) for i in range(4)]
    Driver(runner, token_budget=12, max_rows=2).generate(requests)
    return [request.output for request in requests]


@pytest.mark.slow
def test_a_late_device_gives_the_same_text(files: ModelFiles) -> None:
    assert generate(QueuedRunner(device_runner(files))) == generate(open_runner(files))


def test_a_late_device_notices_memory_that_is_used_too_early(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one set of pinned buffers a step overwrites what the one before it has still to read."""
    monkeypatch.setattr(device, "_DEPTH", 1)
    try:
        found = generate(QueuedRunner(device_runner(files)))
    except Exception:  # of nonsense, anything may come
        return
    assert found != generate(open_runner(files))
