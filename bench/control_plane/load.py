"""The load generator, a process of its own: many streams in a closed loop, and probes that measure the first token.

    idle: probes one after another ─► streams start ─► warm-up ─► window: tokens counted, probes at random times ─► end

Prints one JSON object (`Load`) on stdout. `python -m bench.control_plane.load --help`; started by `bench.control_plane`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import msgspec
import uvloop

from bench.common.sse import Answer, HttpStream
from bench.common.stats import Percentiles
from bench.control_plane.report import Load, ProbeTimes
from bench.control_plane.tap import PROBE_SEED, Tap
from common.models.source import resolve
from common.runtime import logs, nats_bus
from common.text.tokenizer import Tokenizer, load_tokenizer

WORDS = ("river", "stone", "light", "water", "house", "garden", "window", "morning", "paper", "music", "silver", "forest")
PATH = "/v1/chat/completions"
RAMP_S = 1.0


@dataclass(slots=True)
class Window:
    """Tokens are counted between `begin` and `end`; of a request that lies across an edge, the share of its events inside."""

    begun_at: float = 0.0
    ended_at: float = 0.0
    tokens: float = 0.0
    requests: int = 0
    ttft_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Client:
    """One closed-loop stream. `before`: events of its running answer as the window began. `until`: as it ended, or -1."""

    stream: HttpStream
    before: int = 0
    until: int = -1


@dataclass(slots=True)
class ProbeResult:
    """Of each clean probe: the client's time to first token, and the engine's. `unclean`: no text of its own, or not seen."""

    ttft_s: list[float] = field(default_factory=list)
    engine_s: list[float] = field(default_factory=list)
    unclean: int = 0

    def times(self) -> ProbeTimes:
        added = [whole - engine for whole, engine in zip(self.ttft_s, self.engine_s, strict=True)]
        return ProbeTimes(
            count=len(added),
            unclean=self.unclean,
            added_ms=Percentiles.of_seconds(added),
            ttft_ms=Percentiles.of_seconds(self.ttft_s),
            engine_ms=Percentiles.of_seconds(self.engine_s),
        )


class LoadGenerator:
    def __init__(self, options: argparse.Namespace, tap: Tap, tokenizer: Tokenizer) -> None:
        self.options = options
        self.tap = tap
        self.tokenizer = tokenizer
        self.window = Window()
        self.clients = [Client(HttpStream(options.host, options.port)) for _ in range(options.streams)]
        self.stopping = False
        self._random = random.Random(options.seed)
        self._num_probes = 0
        self._idle_probes: list[HttpStream] = []

    async def run(self) -> Load:
        options = self.options
        idle, loaded = ProbeResult(), ProbeResult()
        messages, size, wall, wall_end = 0, 0, 0.0, 0.0
        ends_at = time.perf_counter() + options.idle_seconds
        while time.perf_counter() < ends_at:
            await self._probe(idle)
        async with anyio.create_task_group() as group:
            for client in self.clients:
                group.start_soon(self._drive, client)
            await anyio.sleep(RAMP_S + options.warmup_seconds)
            self._begin()
            messages, size, wall = self.tap.num_messages, self.tap.num_bytes, time.time()
            async with anyio.create_task_group() as probes:
                while (left_s := self.window.begun_at + options.seconds - time.perf_counter()) > 0:
                    await anyio.sleep(
                        min(left_s, self._random.expovariate(options.probe_rate) if options.probe_rate else left_s)
                    )
                    if options.probe_rate:
                        probes.start_soon(self._probe, loaded)
            self._end()
            messages, size, wall_end = self.tap.num_messages - messages, self.tap.num_bytes - size, time.time()
            self.stopping = True
        window = self.window
        elapsed_s = window.ended_at - window.begun_at
        return Load(
            streams=options.streams,
            seconds=elapsed_s,
            window=(wall, wall_end),
            tokens_per_s=window.tokens / elapsed_s,
            requests_per_s=window.requests / elapsed_s,
            errors=window.errors,
            ttft_ms=Percentiles.of_seconds(window.ttft_s),
            idle_probes=idle.times(),
            loaded_probes=loaded.times(),
            frame_messages_per_s=messages / elapsed_s,
            frame_bytes_per_s=size / elapsed_s,
        )

    # -- streams

    async def _drive(self, client: Client) -> None:
        await anyio.sleep(self._random.random() * RAMP_S)
        while not self.stopping:
            client.before, client.until = 0, -1
            # different lengths, so that streams don't end all at once
            length = round(self.options.max_tokens * self._random.uniform(0.5, 1.5))
            answer = await client.stream.post(PATH, self._body(max(1, length), self._random.randrange(PROBE_SEED)))
            self._count(client, answer)
            if answer.error:
                await anyio.sleep(0.2)

    def _body(self, max_tokens: int, seed: int) -> bytes:
        prompt = " ".join(self._random.choices(WORDS, k=self.options.prompt_words))
        return msgspec.json.encode(
            {
                "model": self.options.model_name,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "seed": seed,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    def _begin(self) -> None:
        self.window.begun_at = time.perf_counter()
        for client in self.clients:
            client.before = client.stream.answer.events if client.stream.answer else 0

    def _end(self) -> None:
        self.window.ended_at = time.perf_counter()
        for client in self.clients:
            client.until = client.stream.answer.events if client.stream.answer else 0

    def _count(self, client: Client, answer: Answer) -> None:
        window = self.window
        if answer.error:
            window.errors[answer.error] = window.errors.get(answer.error, 0) + 1
        if not window.begun_at or not answer.events:
            return
        until = answer.events if client.until < 0 else client.until
        window.tokens += answer.tokens * max(0, until - client.before) / answer.events
        if client.until < 0:
            window.requests += 1
            if answer.first_at and answer.sent_at >= window.begun_at:
                window.ttft_s.append(answer.first_at - answer.sent_at)

    # -- probes

    async def _probe(self, result: ProbeResult) -> None:
        """One short request, timed by its client and on the bus."""
        self._num_probes += 1
        seed = PROBE_SEED + self._num_probes
        stream = self._idle_probes.pop() if self._idle_probes else HttpStream(self.options.host, self.options.port)
        answer = await stream.post(PATH, self._body(3, seed))
        self._idle_probes.append(stream)
        trip = self.tap.take(seed)
        if answer.error:
            self.window.errors[answer.error] = self.window.errors.get(answer.error, 0) + 1
        # a token that is only a part of a character shows no text before the next one: not the gateway's doing
        elif trip is None or not trip.first_frame_at or self._decoded(trip.first_token) != answer.first_text[:1]:
            result.unclean += 1
        else:
            result.ttft_s.append(answer.first_at - answer.sent_at)
            result.engine_s.append(trip.first_frame_at - trip.task_at)

    def _decoded(self, token: int) -> str:
        return self.tokenizer.decode([token])[:1]


async def main(options: argparse.Namespace) -> Load:
    tap = Tap()
    bus = await nats_bus.connect(options.nats_url, name="bench-load")
    try:
        workers = [(role, worker) for role, _, worker in (each.partition(":") for each in options.workers.split(","))]
        await tap.listen(bus, gateway=options.gateway, workers=workers)
        return await LoadGenerator(options, tap, load_tokenizer(resolve(options.model))).run()
    finally:
        await bus.close()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.control_plane.load", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--nats-url", required=True)
    parser.add_argument("--gateway", required=True, help="the gateway's worker id")
    parser.add_argument("--workers", required=True, help="role:id,role:id,… of everyone who may be given a task")
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--idle-seconds", type=float, default=5.0)
    parser.add_argument("--warmup-seconds", type=float, default=5.0)
    parser.add_argument("--probe-rate", type=float, default=10.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompt-words", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    logs.configure("warning", "console")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        load = runner.run(main(parse(sys.argv[1:])))
    sys.stdout.buffer.write(msgspec.json.encode(load) + b"\n")
