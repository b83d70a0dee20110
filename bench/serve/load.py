"""The load generator, a process of its own: closed loops and Poisson arrivals over HTTP, token ids in, text out.

    probes on the idle server ─► for each point: warm-up ─► window: requests sent in it are measured ─► all are waited for

Prompts are random token ids (POST /v1/completions), so no prefix is shared and no tokenizer is timed. Prints one JSON object
per point. Started by `bench.serve`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Coroutine, Sequence

import anyio
import msgspec
import uvloop

from bench.common.lengths import Lengths
from bench.common.request import request
from bench.serve.client import Objective, Outcome, Point, TimedStream, summarise

PATH = "/v1/completions"
RAMP_S = 1.0


class Phase(msgspec.Struct, kw_only=True):
    """Poisson arrivals of one kind."""

    name: str
    rate: float
    prompt: Lengths
    output: Lengths


class Plan(msgspec.Struct, kw_only=True):
    """What to do. `streams`: closed loops, a point each. `rates`: Poisson arrivals per second, a point each. `phases`: loads
    that follow one another, `phase_s` each, over and over for `seconds`; a point each.

    `servers`: hosts and ports, asked by turns. `fixed`: an answer has exactly its length; else the model may end it before.
    `vocab`: ids [10, vocab) are sent.
    """

    servers: list[tuple[str, int]]
    model: str
    vocab: int
    prompt: Lengths
    output: Lengths
    fixed: bool = True
    temperature: float = 0.0
    streams: list[int] = []
    rates: list[float] = []
    phases: list[Phase] = []
    phase_s: float = 20.0
    seconds: float = 20.0
    warmup_s: float = 5.0
    probes: int = 0
    probe_prompt: int = 128
    objective: Objective = Objective(1000.0, 50.0)
    timeout_s: float = 300.0
    seed: int = 0


def arrivals(times: random.Random, rate: float, start_s: float, seconds: float) -> list[float]:
    """Return when requests are sent, in seconds: Poisson arrivals, given that as many come as on average. So a window of 20 s
    has the load that it is said to have; by chance it would have a fifth more or less."""
    return sorted(start_s + times.random() * seconds for _ in range(round(rate * seconds)))


class LoadGenerator:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._random = random.Random(plan.seed)
        self._outcomes: list[Outcome] = []
        self._servers = itertools.cycle(plan.servers)
        self._idle: dict[tuple[str, int], list[TimedStream]] = {server: [] for server in plan.servers}
        self._stopping = False

    async def probe(self) -> Point:
        """One request after the other on an idle server, of a few tokens each."""
        begin, wall = time.perf_counter(), time.time()
        self._outcomes = []
        for number in range(self.plan.probes + 3):
            if number == 3:  # the first ones find connections and caches cold
                self._outcomes.clear()
                begin, wall = time.perf_counter(), time.time()
            await self._request(self.plan.probe_prompt, 4)
            await anyio.sleep(0.05)
        return self._point(f"idle, prompts of {self.plan.probe_prompt}", begin, time.perf_counter(), wall)

    async def closed(self, streams: int) -> Point:
        """`streams` clients, each of which sends its next request when its last one has ended."""

        async def client() -> None:
            await anyio.sleep(self._random.random() * RAMP_S)
            while not self._stopping:
                if (await self._request()).error:
                    await anyio.sleep(0.2)

        return await self._measured(f"{streams} streams", [client] * streams)

    async def poisson(self, rate: float) -> Point:
        """Requests at random times, `rate` per second of the window, however many are still running."""
        plan, before_s = self.plan, RAMP_S + self.plan.warmup_s
        times = random.Random(f"{plan.seed} {rate}")
        due_s = arrivals(times, rate, 0.0, before_s) + arrivals(times, rate, before_s, plan.seconds)

        async def send() -> None:
            begin = time.perf_counter()
            async with anyio.create_task_group() as group:
                for due in due_s:
                    await anyio.sleep(max(0.0, begin + due - time.perf_counter()))
                    group.start_soon(self._request)

        return await self._measured(f"{rate:g} requests/s", [send])

    async def flipping(self) -> list[Point]:
        """Loads by turns. A request counts for the one in which it was sent, also where it ends in another."""
        plan, begin, wall = self.plan, time.perf_counter(), time.time()
        outcomes: dict[str, list[Outcome]] = {phase.name: [] for phase in plan.phases}

        async def one(phase: Phase) -> None:
            tokens = phase.prompt.draw(self._random), phase.output.draw(self._random)
            outcomes[phase.name].append(await self._request(*tokens))

        end, times = begin + plan.seconds, random.Random(f"{plan.seed} phases")
        async with anyio.create_task_group() as group:
            for turn in range(math.ceil(plan.seconds / plan.phase_s)):
                phase, start_s = plan.phases[turn % len(plan.phases)], turn * plan.phase_s
                for due in arrivals(times, phase.rate, start_s, min(plan.phase_s, plan.seconds - start_s)):
                    await anyio.sleep(max(0.0, begin + due - time.perf_counter()))
                    group.start_soon(one, phase)
            await anyio.sleep(max(0.0, end - time.perf_counter()))
        return [
            summarise(phase.name, outcomes[phase.name], begin=begin, end=end, wall=wall, objective=plan.objective)
            for phase in plan.phases
        ]

    async def _measured(self, name: str, tasks: Sequence[Callable[[], Coroutine[None, None, None]]]) -> Point:
        self._outcomes, self._stopping = [], False
        begin = end = wall = 0.0
        async with anyio.create_task_group() as group:
            for task in tasks:
                group.start_soon(task)
            await anyio.sleep(RAMP_S + self.plan.warmup_s)
            begin, wall = time.perf_counter(), time.time()
            await anyio.sleep(self.plan.seconds)
            end = time.perf_counter()
            self._stopping = True
        return self._point(name, begin, end, wall)

    def _point(self, name: str, begin: float, end: float, wall: float) -> Point:
        return summarise(name, self._outcomes, begin=begin, end=end, wall=wall, objective=self.plan.objective)

    async def _request(self, prompt_tokens: int = 0, output_tokens: int = 0) -> Outcome:
        plan = self.plan
        prompt_tokens = prompt_tokens or plan.prompt.draw(self._random)
        output_tokens = output_tokens or plan.output.draw(self._random)
        body = {
            "model": plan.model,
            "prompt": [self._random.randrange(10, plan.vocab) for _ in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "ignore_eos": plan.fixed,
            "temperature": plan.temperature,
            "seed": self._random.randrange(1 << 40),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        server = next(self._servers)
        idle = self._idle[server]
        stream = idle.pop() if idle else TimedStream(*server)
        stream.times = []
        answer = await stream.post(PATH, msgspec.json.encode(body), timeout_s=plan.timeout_s)
        outcome = Outcome.of(answer, stream.times, prompt_tokens)
        idle.append(stream)
        self._outcomes.append(outcome)
        return outcome


async def main(plan: Plan) -> None:
    generator = LoadGenerator(plan)

    def say(point: Point) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(point) + b"\n")
        sys.stdout.buffer.flush()

    if plan.probes:
        say(await generator.probe())
    for streams in plan.streams:
        say(await generator.closed(streams))
    for rate in plan.rates:
        say(await generator.poisson(rate))
    if plan.phases:
        for point in await generator.flipping():
            say(point)


if __name__ == "__main__":
    _, plan = request(Plan, "bench.serve.load", __doc__)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(plan))
