"""How long the first decode step waits once a prompt has been computed: with KV that left chunk by chunk, and handed off whole.

    python -m bench.kv_streaming [--prompt-tokens 2048] [--rounds 8] [--model smollm2-135m-instruct]

A prefill and a decode worker with real weights in one process, over the memory bus and real shared memory. Each prompt is
random and new. In turns the parts of a stream reach the decode worker, and are lost: then KV is handed off as a whole. Prints
the time from the end of the last chunk to the beginning of the first decode step (median, and the slowest and fastest), by the
workers' own records, and how much of the KV had been copied before KvReady came. All answers are compared: where the two ways
differ for a prompt, or a decode worker computed KV again, the status is 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import anyio

from bench.common.machine import describe
from bench.common.table import markdown
from common.engine.load.open import open_engine
from common.protocol import messages
from common.protocol import tokens as token_bytes
from common.protocol.errors import ConfigError
from common.protocol.explain_messages import WorkerRecord
from common.protocol.handles import Role
from common.protocol.messages import Cancel, Generation, Message, PrefillTask, Rejected, Renew, SamplingParams, TokenFrames
from common.protocol.stream_messages import KvPart
from common.runtime import logs
from common.runtime.actor import Actor
from common.runtime.bus import BusMessage
from common.runtime.settings import ServiceConfig
from common.testing.memory_bus import MemoryBroker
from common.transfer.cuda_ipc import LocalTransport
from common.worker.actor import EngineWorker
from services.decode.actor import DecodeActor
from services.decode.config import DecodeConfig
from services.prefill.actor import PrefillActor
from services.prefill.config import PrefillConfig

TOKENS = 4
"""Of each answer: the first comes from the prefill worker, the second from the first decode step."""
PATIENCE_S = 120.0


class Asker(Actor):
    """A gateway reduced to one request at a time."""

    role: ClassVar[Role] = "gateway"
    hears = ("prefill", "decode")
    asked: tuple[str, int] = ("", 0)
    tokens: ClassVar[list[int]] = []
    ended = anyio.Event()

    def handle(self, message: Message, reply: str) -> None:
        if not isinstance(message, TokenFrames):
            return
        for frame in message.frames:
            if frame.request == self.asked[0]:
                self.tokens[frame.start :] = frame.tokens
                if frame.finish is not None:
                    self.ended.set()

    async def complete(self, prefill: EngineWorker, decode: EngineWorker, request: str, prompt: list[int]) -> list[int]:
        """Return an answer. :raises ConfigError: it was refused, or is late."""
        self.asked, self.ended = (request, 0), anyio.Event()
        self.tokens.clear()
        generation = Generation(
            request=request,
            attempt=0,
            gateway=self.ref,
            tokens=token_bytes.pack(prompt),
            prompt_tokens=len(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=TOKENS),
            deadline_ms=0,
            remaining_ms=int(PATIENCE_S * 1000),
        )
        answer = await self.ask(prefill.ref, PrefillTask(generation=generation, decode=decode.ref), PATIENCE_S)
        if isinstance(answer, Rejected):
            raise ConfigError(f"the prefill worker refused: {answer.message}")
        with anyio.move_on_after(PATIENCE_S):
            await self.ended.wait()
        if not self.ended.is_set():
            raise ConfigError(f"no answer within {PATIENCE_S:g} s")
        return list(self.tokens)

    def tick(self, now: float) -> None:
        for worker in (*self.registry.alive("prefill", now), *self.registry.alive("decode", now)):
            self.send(worker.worker, Renew(gateway=self.ref, requests=[self.asked]))


@dataclass(frozen=True)
class Round:
    """wait_s: from the end of the last chunk to the first decode step. early_bytes: of `num_bytes`, before KvReady came."""

    wait_s: float
    num_bytes: int
    early_bytes: int
    answer: list[int]


class Site:
    def __init__(self, broker: MemoryBroker, asker: Asker, prefill: PrefillActor, decode: DecodeActor) -> None:
        self.broker, self.asker, self.prefill, self.decode = broker, asker, prefill, decode
        self._num_asked = 0

    async def hand_off(self, prompt: list[int], *, streamed: bool) -> Round:
        """:raises ConfigError: there was no answer, or KV was computed again."""
        for worker in (self.prefill, self.decode):
            for group in worker.pool.groups:
                group.pool.drop_cached()
        self._num_asked += 1
        request = f"request-{self._num_asked}"
        undo = self.broker.drop(lambda message: not streamed and is_part(message))
        try:
            answer = await self.asker.complete(self.prefill, self.decode, request, prompt)
        finally:
            undo()
        held = self.decode.held.get(request)
        prefill, decode = record(self.prefill, request), record(self.decode, request, held=True)
        chunks = [event for event in prefill.events if event.name == "chunk"]
        (pulled,) = (event for event in decode.events if event.name == "pull")
        (first,) = (event for event in decode.events if event.name == "first step")
        if pulled.error or decode.recomputed_tokens or held is None:
            raise ConfigError(f"the decode worker computed {decode.recomputed_tokens} tokens again {pulled.error}")
        early = dict(pulled.facts).get("streamed_bytes", 0)
        self.asker.send(self.decode.ref, Cancel(requests=[(request, 0)]))
        return Round(first.began_at - chunks[-1].ended_at, pulled.num_bytes, early, answer)


def is_part(message: BusMessage) -> bool:
    return b"KvPart" in message.data[:32] and isinstance(messages.decode(message.data), KvPart)


def record(worker: EngineWorker, request: str, *, held: bool = False) -> WorkerRecord:
    return worker.traces.explain(request, worker.held.get(request) if held else None).records[-1]


@asynccontextmanager
async def running(model: str, num_tokens: int, shm_dir: str) -> AsyncIterator[Site]:
    """:raises ConfigError: the model can't be opened."""
    broker = MemoryBroker()
    cache_mb = num_tokens * 3 // 16  # three prompts in float32 of a model of this size
    patience = {"shm_dir": shm_dir, "dead_after_s": PATIENCE_S, "lease_s": PATIENCE_S}  # one event loop, on a busy machine
    shared = {**patience, "model": model, "dtype": "float32", "kv_cache_mb": max(64, cache_mb), "http_port": -1}
    shared["step_timeout_s"] = PATIENCE_S
    prefill_config = PrefillConfig(**shared)  # pyright: ignore[reportArgumentType]
    decode_config = DecodeConfig(**shared, speculation_tokens=0)  # pyright: ignore[reportArgumentType]
    transport = LocalTransport(shm_dir)
    prefill = PrefillActor(
        bus=broker.connect("prefill"),
        config=prefill_config,
        open_engine=lambda name, on_progress: open_engine(prefill_config, name, on_progress),
    )
    decode = DecodeActor(
        bus=broker.connect("decode"),
        config=decode_config,
        open_engine=lambda name, on_progress: open_engine(decode_config, name, on_progress, transport=transport),
        transport=transport,
    )
    asker = Asker(bus=broker.connect("gateway"), config=ServiceConfig(**patience))  # pyright: ignore[reportArgumentType]
    async with anyio.create_task_group() as tasks:
        for actor in (asker, prefill, decode):
            await tasks.start(actor.run)
        with anyio.fail_after(PATIENCE_S):
            while not (prefill.ready and decode.ready and len(asker.registry.alive("decode", asker.clock()))):  # noqa: ASYNC110
                await anyio.sleep(0.05)
        await anyio.sleep(1.0)  # until the decode worker has heard the prefill worker
        yield Site(broker, asker, prefill, decode)
        tasks.cancel_scope.cancel()
    transport.close()


async def measure(arguments: argparse.Namespace) -> int:
    rounds: dict[bool, list[Round]] = {True: [], False: []}
    dice, num_different = random.Random(arguments.seed), 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        async with running(arguments.model, arguments.prompt_tokens, folder) as site:
            vocab_size = site.prefill.engine.runner.vocab_size
            for number in range(arguments.rounds + 1):  # the first is short, and not counted
                num_tokens = arguments.prompt_tokens if number else min(arguments.prompt_tokens, 512)
                prompt = [dice.randrange(10, vocab_size) for _ in range(num_tokens)]
                order = (True, False) if number % 2 else (False, True)
                both = {streamed: await site.hand_off(prompt, streamed=streamed) for streamed in order}
                num_different += both[True].answer != both[False].answer
                if number:
                    for streamed, one in both.items():
                        rounds[streamed].append(one)
    print(describe(), file=sys.stderr)
    rows = [(name, *shown(rounds[streamed])) for name, streamed in (("streamed", True), ("as a whole", False))]
    print(markdown(("hand-off", "last chunk → first decode step, ms", "MB before KvReady", "MB"), rows))
    if num_different:
        print(f"{num_different} of {arguments.rounds + 1} prompts were answered differently", file=sys.stderr)
    return 1 if num_different else 0


def shown(rounds: list[Round]) -> tuple[str, str, str]:
    waits = sorted(1000 * one.wait_s for one in rounds)
    early, total = (median(values) / 1e6 for values in zip(*((one.early_bytes, one.num_bytes) for one in rounds), strict=True))
    return f"{median(waits):.1f} ({waits[-1]:.1f}, {waits[0]:.1f})", f"{early:.1f}", f"{total:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=8, help="prompts, each handed off in both ways")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logs.configure("warning")
    try:
        status = anyio.run(measure, arguments)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    sys.exit(status)


if __name__ == "__main__":
    main()
