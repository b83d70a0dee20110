"""A gateway on the memory bus between worker doubles that speak the real protocol, follow a script and count what they hold.

The doubles' tokens are a checksum of their model and of everything before them, so a gap, a duplicate, a foreign token or
another model's worker changes all that follow.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.abc import TaskGroup

from common.protocol import tokens as token_bytes
from common.protocol.errors import PenstockError
from common.protocol.handles import KvHandle, Role, WorkerRef, new_lease
from common.protocol.messages import (
    Accepted,
    Cancel,
    DecodeTask,
    FetchFrames,
    Generation,
    HandedOff,
    HandoffFailed,
    KvReady,
    Message,
    PrefillTask,
    Presence,
    Redirect,
    Rejected,
    Renew,
    SamplingParams,
    TokenFrame,
    TokenFrames,
    Unknown,
)
from common.runtime.actor import Actor, WorkerState
from common.runtime.settings import ServiceConfig
from common.testing.memory_bus import MemoryBroker, MemoryBus
from common.text.bundle import TextBundle
from services.gateway.actor import GatewayActor
from services.gateway.config import GatewayConfig
from services.gateway.model_core import ModelCore, Served
from services.gateway.requests import GenerationRequest
from services.gateway.stream import Stream
from tests.waiting import until

MODEL = "smollm2-135m-instruct"
VOCABULARY = 256
LONG = list(range(1, 40))
SHORT = [7, 8, 9]
TIMES: dict[str, Any] = {"heartbeat_s": 0.05, "dead_after_s": 0.6, "lease_s": 2.0, "drain_timeout_s": 3.0}


def next_token(tokens: list[int], model: str = MODEL) -> int:
    return zlib.crc32(token_bytes.pack(tokens), zlib.crc32(model.encode())) % VOCABULARY


def expected(prompt: list[int], count: int, *, model: str = MODEL) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, model))
    return tokens[len(prompt) :]


class Held:
    def __init__(self, generation: Generation, model: str) -> None:
        self.generation = generation
        self.model = model
        self.tokens = token_bytes.unpack(generation.tokens)
        self.paused = False

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.generation.prompt_tokens :]

    @property
    def finished(self) -> bool:
        return len(self.outputs) >= self.generation.sampling.max_tokens

    def step(self) -> None:
        self.tokens.append(next_token(self.tokens, self.model))

    def frame(self, start: int) -> TokenFrame:
        generation = self.generation
        finish = "length" if self.finished else None
        return TokenFrame(generation.request, generation.attempt, start, self.outputs[start:], finish=finish, cached_tokens=3)


class Double(Actor):
    """`refuse`: a code that tasks are rejected with. `lose(frame)`: frames that never leave. `frozen`: no step, no answer."""

    def __init__(self, bus: MemoryBus, number: int, *, credits: int = 64, model: str = MODEL, **said: Any) -> None:
        super().__init__(bus=bus, config=ServiceConfig(worker_id=f"{self.role}-{number}", **TIMES), clock=time.monotonic)
        self.memory_bus = bus
        self.model = model
        self.held: dict[str, Held] = {}
        self.credits = credits
        self.said = said
        self.refuse = ""
        self.mute = False
        self.lose: Callable[[TokenFrame], bool] = lambda frame: False
        self.num_tasks = 0
        self.tasks: list[Generation] = []
        self.renewed: list[str] = []

    def presence(self, state: WorkerState) -> Presence:
        spare = max(0, self.credits - len(self.held))
        more = {"fingerprint": "f", "host": "h", **self.said}
        return Presence(worker=self.ref, state=state, model=self.model, running=len(self.held), credits=spare, **more)

    def admit(self, generation: Generation, reply: str) -> Held | None:
        self.tasks.append(generation)
        if self.mute:
            return None
        code = self.refuse or ("out_of_credits" if len(self.held) >= self.credits else "")
        code = "shutting_down" if self.state == "draining" else code
        if code:
            self.answer(reply, Rejected(worker=self.ref, code=code, message="no"))
            return None
        held = self.held[generation.request] = Held(generation, self.model)
        self.answer(reply, Accepted(worker=self.ref))
        return held

    def handle(self, message: Message, reply: str) -> None:
        match message:
            case Cancel():
                for request, attempt in message.requests:
                    held = self.held.get(request)
                    if held is not None and held.generation.attempt <= attempt:
                        del self.held[request]
            case Renew():
                self.renewed += [request for request, _ in message.requests]
                unknown = [(request, attempt) for request, attempt in message.requests if request not in self.held]
                if unknown:
                    self.send(message.gateway, Unknown(worker=self.ref, requests=unknown))
            case FetchFrames():
                held = self.held.get(message.request)
                if held is None:
                    self.send(message.gateway, Unknown(worker=self.ref, requests=[(message.request, message.attempt)]))
                elif not self.mute:
                    self.say(held, message.start)
            case _:
                self.handle_task(message, reply)

    def handle_task(self, message: Message, reply: str) -> None: ...

    def say(self, held: Held, start: int) -> None:
        frame = held.frame(start)
        if not self.lose(frame):
            self.send(held.generation.gateway, TokenFrames(worker=self.ref, frames=[frame]))

    async def drain(self) -> None:
        await until(lambda: not self.held, 60.0)

    def fenced(self) -> None:
        self.held.clear()


class DecodeDouble(Double):
    role = "decode"
    step_s = 0.004

    def handle_task(self, message: Message, reply: str) -> None:
        if isinstance(message, (DecodeTask, KvReady)):
            self.admit(message.generation, reply)

    async def work(self) -> None:
        while True:
            await anyio.sleep(self.step_s)
            frames: dict[WorkerRef, list[TokenFrame]] = {}
            for held in self.held.values():
                if self.mute or held.finished or held.paused:
                    continue
                held.step()
                frame = held.frame(len(held.outputs) - 1)
                if not self.lose(frame):
                    frames.setdefault(held.generation.gateway, []).append(frame)
            for gateway, rows in frames.items():
                self.send(gateway, TokenFrames(worker=self.ref, frames=rows))


class PrefillDouble(Double):
    role = "prefill"
    prefill_s = 0.005
    before_handoff_s = 0.0

    def handle_task(self, message: Message, reply: str) -> None:
        if isinstance(message, PrefillTask):
            held = self.admit(message.generation, reply)
            if held is not None:
                self.task_group.start_soon(self.compute, held, message.decode)
        elif isinstance(message, Redirect) and message.request in self.held:
            self.task_group.start_soon(self.hand_off, self.held[message.request], message.decode)

    async def compute(self, held: Held, decode: WorkerRef) -> None:
        await anyio.sleep(self.prefill_s)
        await until(lambda: not self.mute, 60.0)
        if self.held.get(held.generation.request) is not held:
            return
        held.step()
        self.say(held, len(held.outputs) - 1)
        await anyio.sleep(self.before_handoff_s)
        if not held.finished:
            await self.hand_off(held, decode)

    async def hand_off(self, held: Held, decode: WorkerRef) -> None:
        generation = held.generation
        moved = Generation(
            request=generation.request,
            attempt=generation.attempt,
            gateway=generation.gateway,
            tokens=token_bytes.pack(held.tokens),
            prompt_tokens=generation.prompt_tokens,
            sampling=generation.sampling,
            deadline_ms=generation.deadline_ms,
        )
        handle = KvHandle(owner=self.ref, lease=new_lease(), fingerprint="f", num_tokens=1, chain=b"", groups=[])
        request, attempt = generation.request, generation.attempt
        try:
            answer = await self.ask(decode, KvReady(generation=moved, handle=handle), 0.3)
            code = answer.code if isinstance(answer, Rejected) else ""
        except PenstockError as error:
            code = error.code
        if self.held.get(request) is not held:
            return
        if code:
            self.send(generation.gateway, HandoffFailed(worker=self.ref, request=request, attempt=attempt, code=code))
        else:
            del self.held[request]
            self.send(generation.gateway, HandedOff(worker=self.ref, request=request, attempt=attempt, decode=decode))


class Site:
    """Everything in one event loop. `prefill` and `decode` are the doubles, in the order in which they were added."""

    def __init__(
        self, group: TaskGroup, config: GatewayConfig, models: Sequence[Served] = (), *, broker: MemoryBroker | None = None
    ) -> None:
        self.group = group
        self.broker = broker or MemoryBroker()
        self.gateway_bus = self.broker.connect("gateway")
        clock = time.monotonic  # named, since it is another one in a test that is marked `virtual_time`
        self.gateway = GatewayActor(bus=self.gateway_bus, config=config, models=models, clock=clock)
        self.prefill: list[PrefillDouble] = []
        self.decode: list[DecodeDouble] = []
        self._numbers = 0

    @property
    def workers(self) -> list[Double]:
        return [*self.prefill, *self.decode]

    @property
    def core(self) -> ModelCore:
        """The only, or the first, model."""
        return self.gateway.cores[0]

    async def add(self, role: Role, **options: Any) -> Any:
        kind, pool = (PrefillDouble, self.prefill) if role == "prefill" else (DecodeDouble, self.decode)
        double: Any = kind(self.broker.connect(role), len(pool) + 1, **options)
        pool.append(double)
        await self.group.start(double.run)
        return double

    async def kill(self, double: Double) -> None:
        """kill -9: it says nothing more, and nobody listens there."""
        double.memory_bus.kill()
        double.task_group.cancel_scope.cancel()
        double.held.clear()

    def generate(self, prompt: list[int], *, max_tokens: int = 32, deadline_s: float = 20.0, id: str = "") -> Stream:
        self._numbers += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = GenerationRequest(id=id or f"r{self._numbers}", prompt=prompt, sampling=sampling, deadline_s=deadline_s)
        return self.gateway.generate(request)

    async def until(self, condition: Callable[[], object], timeout_s: float = 5.0) -> None:
        await until(condition, timeout_s)

    async def nothing_held(self, timeout_s: float = 1.8) -> None:
        """Every worker has let go of everything, and so has the gateway."""
        await self.until(lambda: not any(double.held for double in self.workers), timeout_s)
        for core in self.gateway.cores:
            assert not core.dispatcher.requests
            members = [*core.router.prefill.members.values(), *core.router.decode.members.values()]
            assert [(worker.ours, worker.tokens) for worker in members] == [(0, 0)] * len(members)


async def read(stream: Stream) -> list[int]:
    """All tokens of a stream that must end well."""
    tokens: list[int] = []
    while True:
        output = await stream.next()
        tokens += output.tokens
        if output.error is not None:
            raise output.error
        if output.finish is not None:
            return tokens


async def read_some(stream: Stream, count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        output = await stream.next()
        assert output.error is None
        tokens += output.tokens
    return tokens


@asynccontextmanager
async def site(*, prefill: int = 1, decode: int = 1, bundle: TextBundle | None = None, **settings: Any) -> AsyncIterator[Site]:
    """A running site whose workers the gateway has heard of. No canary unless `canary=True`."""
    options: dict[str, Any] = {"canary": False, "task_timeout_s": 0.5, "stall_s": 0.2, "direct_max_tokens": 4, **TIMES}
    async with anyio.create_task_group() as group:
        config = GatewayConfig(**{**options, **settings})
        made = Site(group, config, [Served(config, bundle)])
        for _ in range(prefill):
            await made.add("prefill")
        for _ in range(decode):
            await made.add("decode")
        await group.start(made.gateway.run)
        router = made.core.router
        await made.until(lambda: router.prefill.usable == prefill and router.decode.usable == decode)
        yield made
        group.cancel_scope.cancel()


async def many(at: Site, count: int, *, max_tokens: int = 64) -> None:
    """Run `count` requests of both kinds at once; each must give exactly its tokens."""

    async def one(number: int) -> None:
        prompt = [number, *(LONG if number % 2 else SHORT)]
        assert await read(at.generate(prompt, max_tokens=max_tokens)) == expected(prompt, max_tokens)

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(one, number)
