"""What one tenant's greed does to the other's first tokens: the same modest load alone and beside it, in turns.

    per shape: capacity ─► alone ─► beside ─► alone ─► beside …        ratio of a turn: p99 beside / p99 alone

The greedy tenant keeps ten times its share of the decode worker's places asked for. The modest one sends a tenth of what the
pool carries, a fifth of its share, at random times, however long its answers take.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import anyio
import anyio.abc
import msgspec

from bench.common.sse import Answer, HttpStream
from bench.common.stack import ROOT
from bench.mixed_load.greedy_tenant import GreedyOptions, body
from bench.mixed_load.site import TENANTS, Site, Sizes, running

MODEL = "alpha"
MODEST_SHARE = 0.1
CAPACITY_S = 12.0
SETTLE_S = 3.0
PROFILE = "h200-llama-8b"
SHAPES = {"decode is busy": (24, 96), "prefill is busy": (1200, 16)}
"""Tokens of prompts and answers."""

Engine = Literal["simulated", "real", "gpu"]


class GreedyRun(msgspec.Struct, frozen=True, kw_only=True):
    """`turn_s`: seconds of each half of a turn. `time_scale`: how much slower than the roofline the simulated engine is.
    `max_running`: places of a worker. `shape`: of both models on a GPU, with random weights. `prefill`: prefill workers there,
    each on a GPU of its own."""

    engine: Engine
    max_running: int
    shape: str
    prefill: int
    time_scale: float
    turns: int
    turn_s: float
    seed: int

    @property
    def greedy_at_once(self) -> int:
        """Ten times the half of the places that is its share."""
        return 10 * self.max_running // 2


class Half(msgspec.Struct, frozen=True):
    """The modest tenant's times to the first token in one half of a turn, seconds, and how many of its requests failed."""

    ttft_s: list[float]
    failed: int = 0

    def percentile(self, share: float) -> float:
        return percentile(self.ttft_s, share)


class ShapeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One shape of load. `capacity`, `modest`: requests per second of the greedy tenant alone, and of the modest one."""

    name: str
    capacity: float
    modest: float
    alone: list[Half]
    beside: list[Half]
    greedy_answered: float

    def ratio(self, share: float) -> float:
        """Return the median over turns of this percentile beside the greedy tenant by that alone."""
        return median_ratio([h.percentile(share) for h in self.alone], [h.percentile(share) for h in self.beside])


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of `values` lie; 0 where there are none."""
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


def median_ratio(alone: Sequence[float], beside: Sequence[float]) -> float:
    """Return the median of the ratios of each turn; a turn without a measurement counts for nothing."""
    ratios = [b / a for a, b in zip(alone, beside, strict=True) if a > 0 and b > 0]
    return statistics.median(ratios) if ratios else 0.0


def sizes(options: GreedyRun) -> Sizes:
    """Return a prefill and a decode worker for each of two models; on GPUs, a decode worker of one, and `prefill` workers."""
    if options.engine == "gpu":
        workers = {MODEL: {"prefill": options.prefill, "decode": 1, "draft": 0}}
        engine = ['dtype = "bfloat16"', 'load_format = "dummy"', f"max_running = {options.max_running}", "max_model_len = 4096"]
        return Sizes(gateways=1, kvstores=0, workers=workers, engine=engine, shape=options.shape, device="cuda")
    engine = ["threads = 1", "num_blocks = 4000", f"max_running = {options.max_running}"]
    if options.engine == "simulated":
        engine += ['engine = "simulated"', f'profile = "{PROFILE}"', f"time_scale = {options.time_scale}"]
    else:
        engine.append('dtype = "float32"')
    workers = {name: {"prefill": 1, "decode": 1, "draft": 0} for name in ("alpha", "beta")}
    return Sizes(gateways=1, kvstores=0, workers=workers, engine=engine)


@asynccontextmanager
async def greedy_beside(site: Site, options: GreedyOptions) -> AsyncIterator[list[int]]:
    """The greedy tenant at work; how many of its requests were answered, at each second."""
    counts: list[int] = []
    started = anyio.Event()
    command = [sys.executable, "-m", "bench.mixed_load.greedy_tenant", msgspec.json.encode(options).decode()]

    async def read(process: anyio.abc.Process) -> None:
        assert process.stdout is not None
        rest = b""
        async for piece in process.stdout:
            *lines, rest = (rest + piece).split(b"\n")
            counts.extend(map(int, lines))
            if counts:
                started.set()

    async with await anyio.open_process(command, cwd=ROOT, stderr=None) as process, anyio.create_task_group() as group:
        assert process.stdin is not None
        await process.stdin.send(site.keys[TENANTS[1]].encode() + b"\n")
        group.start_soon(read, process)
        await started.wait()
        try:
            yield counts
        finally:
            process.terminate()
            group.cancel_scope.cancel()


class Modest:
    """The tenant whose first tokens are measured."""

    def __init__(self, site: Site, options: GreedyOptions, rate: float) -> None:
        self._site = site
        self._options = options
        self.rate = rate
        self._rng = random.Random(f"modest {options.seed}")
        self._idle: list[HttpStream] = []

    async def half(self, seconds: float) -> Half:
        """Send for so long, and wait for all answers."""
        found: list[Answer] = []
        async with anyio.create_task_group() as requests:
            due = time.perf_counter()
            ends_at = due + seconds
            while (due := due + self._rng.expovariate(self.rate)) < ends_at:
                await anyio.sleep(max(0.0, due - time.perf_counter()))
                requests.start_soon(self._one, found)
        # the headers come with the first token, which may be no text yet: part of a character
        well = [answer.head_at - answer.sent_at for answer in found if not answer.error]
        return Half(well, len(found) - len(well))

    async def _one(self, found: list[Answer]) -> None:
        key = self._site.keys[TENANTS[0]]
        stream = self._idle.pop() if self._idle else HttpStream("127.0.0.1", self._site.http_port, key=key)
        found.append(await stream.post("/v1/completions", body(self._options, self._rng)))
        self._idle.append(stream)


async def run(options: GreedyRun, folder: Path) -> list[ShapeReport]:
    """:raises ConfigError: the system does not start."""
    with running(folder, sizes(options)) as site:
        return [await _shape(options, site, name, *tokens) for name, tokens in SHAPES.items()]


async def _shape(options: GreedyRun, site: Site, name: str, prompt: int, answer: int) -> ShapeReport:
    asked = GreedyOptions(
        port=site.http_port, model=MODEL, at_once=options.greedy_at_once, prompt=prompt, answer=answer, seed=options.seed
    )
    async with greedy_beside(site, asked) as counts:
        await anyio.sleep(SETTLE_S)
        before = counts[-1]
        await anyio.sleep(CAPACITY_S)
        capacity = (counts[-1] - before) / CAPACITY_S
    modest = Modest(site, asked, max(1.0, MODEST_SHARE * capacity))
    alone: list[Half] = []
    beside: list[Half] = []
    answered = 0.0
    for turn in range(options.turns):
        await anyio.sleep(SETTLE_S)
        alone.append(await modest.half(options.turn_s))
        seed = options.seed + 1 + turn
        async with greedy_beside(site, msgspec.structs.replace(asked, seed=seed)) as counts:
            await anyio.sleep(SETTLE_S)
            before = counts[-1]
            beside.append(await modest.half(options.turn_s))
            answered += counts[-1] - before
        print(
            f"{name}, turn {turn + 1}: p99 {1e3 * alone[-1].percentile(0.99):.1f} ms alone, "
            f"{1e3 * beside[-1].percentile(0.99):.1f} ms beside, of {len(beside[-1].ttft_s)}",
            flush=True,
        )
    rate = answered / options.turns / options.turn_s
    return ShapeReport(name=name, capacity=capacity, modest=modest.rate, alone=alone, beside=beside, greedy_answered=rate)
