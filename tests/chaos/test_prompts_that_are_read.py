"""Prompts that are scored or embedded, in virtual time: right whatever dies, and nobody holds anything afterwards."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from common.engine.plan import FIXED_POINT, StepPlan, StepResult
from common.engine.simulated.runner import SimulatedRunner, expected_scores, expected_total
from common.protocol.errors import Cancelled, ContextLengthExceeded, DeadlineExceeded, NoWorkers, WorkersDied
from common.protocol.messages import Pooling, SamplingParams, TokenLogprobs
from common.worker.actor import EngineWorker
from services.gateway.requests import GenerationRequest, Output
from tests.chaos.test_one_world import play, prompt
from tests.chaos.world import World

LONG = prompt(200)
Read = Callable[[], Coroutine[Any, Any, None]]


def scoring(id: str, tokens: list[int], *, top: int = 2, deadline_s: float = 600) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=len(tokens) - 1, logprobs=top)
    return GenerationRequest(id=id, prompt=tokens[:1], given=tokens[1:], sampling=sampling, deadline_s=deadline_s)


def embedding(id: str, tokens: list[int], pooling: Pooling = "mean") -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    return GenerationRequest(id=id, prompt=tokens, pooling=pooling, sampling=sampling, deadline_s=600)


class Reader:
    """One client. `tokens` and `scores` so far; `last` once it has ended."""

    def __init__(self, world: World, request: GenerationRequest) -> None:
        self.stream = world.gateway.generate(request)
        self.tokens: list[int] = []
        self.scores: list[TokenLogprobs] = []
        self.last: Output | None = None
        world.task_group.start_soon(self._read)

    async def _read(self) -> None:
        while self.last is None:
            output = await self.stream.next()
            self.tokens += output.tokens
            self.scores += output.logprobs or []
            if output.finish is not None or output.error is not None:
                self.last = output

    async def end(self, within_s: float = 60) -> Output:
        with anyio.fail_after(within_s):
            while self.last is None:
                await anyio.sleep(0.05)
        return self.last

    async def check_scores(self, tokens: list[int]) -> None:
        last = await self.end()
        assert (last.error, last.finish) in ((None, "stop"), (None, "length"))
        assert self.tokens == tokens[1:]
        assert [one.logprob for one in self.scores] == expected_scores(tokens)
        assert all(len(one.top_tokens) == 2 and one.rank == 3 for one in self.scores)


async def check_mean(reader: Reader, tokens: list[int]) -> None:
    last = await reader.end()
    assert last.error is None
    whole = expected_total(tokens) * FIXED_POINT
    assert np.frombuffer(last.embedding, "<f4") == pytest.approx(whole / np.linalg.norm(whole), abs=1e-6)


def slow_steps(world: World, name: str, step_s: float) -> None:
    """This worker's steps take so long from now on."""
    worker = world.processes[name].actor
    assert isinstance(worker, EngineWorker)
    start = worker._threads.start

    async def late(running: Any) -> StepResult:
        await anyio.sleep(step_s)
        return await running

    import asyncio

    worker._threads.start = lambda *given, **how: asyncio.ensure_future(late(start(*given, **how)))  # type: ignore[method-assign]


def test_every_length_is_scored_and_embedded_beside_prompts_that_are_continued(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for length in (2, 4, 5, 16, 17, 40, 256):
            tokens = prompt(length, length)
            world.submit(tokens[:100], max_tokens=8)
            scored, embedded = Reader(world, scoring(f"s{length}", tokens)), Reader(world, embedding(f"e{length}", tokens))
            await scored.check_scores(tokens)
            await check_mean(embedded, tokens)

    play(tmp_path, story)


def test_no_decode_worker_is_needed_to_read(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await Reader(world, scoring("s", LONG)).check_scores(LONG)
        await check_mean(Reader(world, embedding("e", LONG)), LONG)

    play(tmp_path, story, roles=("prefill", "gateway"))


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_prefill_worker_that_is_killed_does_not_change_what_is_read(tmp_path: Path, when: str) -> None:
    async def story(world: World) -> None:
        first = world.alive("prefill")[0]
        slow_steps(world, first, 0.05)
        readers = [Reader(world, scoring(f"s{index}", prompt(200, index))) for index in range(4)]
        means = [Reader(world, embedding(f"e{index}", prompt(200, index))) for index in range(2)]
        second = await world.start("prefill")
        while when == "later" and len(readers[0].tokens) < 40:
            await anyio.sleep(0.01)
        await world.kill(first)
        for index, reader in enumerate(readers):
            await reader.check_scores(prompt(200, index))
        for index, reader in enumerate(means):
            await check_mean(reader, prompt(200, index))
        assert world.alive("prefill") == [second]

    play(tmp_path, story)


def test_a_cancelled_reading_frees_its_worker(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        slow_steps(world, world.alive("prefill")[0], 0.05)
        reader = Reader(world, scoring("s", LONG))
        while not reader.tokens:
            await anyio.sleep(0.01)
        reader.stream.cancel()
        assert isinstance((await reader.end()).error, Cancelled)

    play(tmp_path, story)


def test_a_deadline_ends_a_reading(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        slow_steps(world, world.alive("prefill")[0], 1.0)
        reader = Reader(world, scoring("s", LONG, deadline_s=3))
        assert isinstance((await reader.end()).error, DeadlineExceeded)

    play(tmp_path, story)


def test_without_a_prefill_worker_it_waits_and_is_told(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        reader = Reader(world, embedding("e", LONG))
        late = Reader(world, scoring("s", LONG))
        await anyio.sleep(5)
        assert reader.last is None and late.last is None
        error = (await reader.end()).error
        assert isinstance(error, NoWorkers)
        await late.end()
        again = Reader(world, scoring("again", LONG))
        await world.start("prefill")
        await again.check_scores(LONG)

    play(tmp_path, story, roles=("gateway",))


def test_decode_workers_read_where_there_is_no_prefill_worker(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        first = world.alive("decode")[0]
        slow_steps(world, first, 0.05)
        for index in range(4):
            world.submit(prompt(20, index), max_tokens=40)
        readers = [Reader(world, scoring(f"s{index}", prompt(150, index))) for index in range(3)]
        mean, one = Reader(world, embedding("m", LONG[:90])), Reader(world, scoring("one", [5, 6]))
        while len(readers[0].tokens) < 40:
            await anyio.sleep(0.01)
        await world.start("decode")
        await anyio.sleep(1)
        await world.kill(first)
        for index, reader in enumerate(readers):
            await reader.check_scores(prompt(150, index))
        await check_mean(mean, LONG[:90])
        await one.check_scores([5, 6])

    play(tmp_path, story, roles=("decode", "gateway"))


def test_more_than_a_worker_takes_wait_their_turn(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        readers = [Reader(world, scoring(f"s{index}", prompt(60, index))) for index in range(40)]
        for index, reader in enumerate(readers):
            await reader.check_scores(prompt(60, index))

    play(tmp_path, story)


def test_a_prompt_that_kills_workers_is_given_up(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        reader = Reader(world, scoring("s", LONG))
        while reader.last is None:
            for name in world.alive("prefill"):
                slow_steps(world, name, 100.0)
            holding = [n for n in world.alive("prefill") if len(world.processes[n].actor.held)]  # type: ignore[attr-defined]
            for name in holding:
                await world.kill(name)
            if not world.alive("prefill"):
                await world.start("prefill")
            await anyio.sleep(0.2)
        assert isinstance(reader.last.error, WorkersDied)

    play(tmp_path, story)


def test_a_prompt_that_no_worker_can_hold_is_refused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        tokens = prompt(257)
        assert isinstance((await Reader(world, scoring("s", tokens)).end()).error, ContextLengthExceeded)

    play(tmp_path, story)


def test_a_step_that_raises_ends_only_the_reading_that_it_raises_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = SimulatedRunner.execute
    poison = 900

    def broken(self: SimulatedRunner, plan: StepPlan) -> StepResult:
        if any(poison in row.tokens for row in plan.rows):
            raise RuntimeError("a broken row")
        return execute(self, plan)

    monkeypatch.setattr(SimulatedRunner, "execute", broken)

    async def story(world: World) -> None:
        good = Reader(world, scoring("good", LONG))
        assert poison not in LONG
        bad = Reader(world, embedding("bad", [*prompt(30)[:20], poison, 5]))
        assert (await bad.end()).error is not None
        await good.check_scores(LONG)

    play(tmp_path, story)
