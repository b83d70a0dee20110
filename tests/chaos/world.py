"""A whole Penstock in one event loop and virtual time: real actors, real shared memory, the memory bus, simulated engines.

Everything that can go wrong can be made to: processes die or stop, the bus goes away, messages are lost. Tokens come from a
hash of the KV that was really read, so any wrong block shows up as a wrong token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import torch
from anyio.abc import TaskGroup

from common.cache.retention import KEEP_ALL, Retention
from common.cache.spec import group_name
from common.engine.engine import Engine, GroupMemory
from common.engine.plan import RunnerLost
from common.engine.simulated.runner import BYTES_PER_TOKEN, SimulatedRunner, TokenRule, expected_tokens
from common.protocol.errors import PenstockError
from common.protocol.handles import Role
from common.protocol.messages import SamplingParams
from common.runtime.actor import Actor
from common.testing.memory_bus import MemoryBroker, MemoryBus
from common.transfer.host_stage import HostStage
from common.transfer.segment import Segment
from common.transfer.shm import ShmTransport
from common.worker.actor import EngineWorker
from services.decode.actor import DecodeActor
from services.decode.config import DecodeConfig
from services.decode.scheduler import DecodeScheduler
from services.draft.actor import DraftActor
from services.draft.config import DraftConfig
from services.gateway.actor import GatewayActor
from services.gateway.config import GatewayConfig
from services.gateway.requests import GenerationRequest
from services.kvstore.actor import KvstoreActor
from services.kvstore.config import KvstoreConfig
from services.prefill.actor import PrefillActor
from services.prefill.config import PrefillConfig

BLOCK_TOKENS = 4
STAGE_BYTES = 2048
"""Slots of 16 blocks."""
VOCAB = 997
MAX_CONTEXT = 256
RULE = TokenRule(VOCAB, repetition=0.5)


@dataclass
class Process:
    """An actor that runs as if it were a process of its own."""

    actor: Actor
    bus: MemoryBus
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)


@dataclass
class Outcome:
    """What a client saw of one request."""

    prompt: list[int]
    sampling: SamplingParams
    rule: TokenRule = RULE
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: PenstockError | None = None
    ended: bool = False
    tenant: str = ""
    cached_tokens: int = 0
    asked_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def expected(self) -> list[int]:
        return expected_tokens(self.prompt, self.sampling, self.sampling.max_tokens, rule=self.rule)


class World:
    def __init__(
        self,
        task_group: TaskGroup,
        shm_dir: Path,
        *,
        seed: int = 0,
        num_blocks: int = 256,
        run_ahead: int = 1,
        max_running: int = 8,
        zero_retention: bool = False,
        windows: tuple[tuple[Retention, int], ...] = (),
        keeps: Retention = KEEP_ALL,
        objective_ms: float = 0.0,
        staged: bool = False,
        recompute: int = 0,
    ) -> None:
        """`keeps`: what the first cache group keeps. `windows`: what the others keep, and how many blocks each has.
        `objective_ms`: for first tokens, and for the time between tokens; 0: none. `staged`: KV passes through a stage on its
        way to kvstores and back, as that of GPUs does. `recompute`: last tokens whose KV a decode worker has copied and
        computes all the same, as for a head on a GPU."""
        self.staged, self.recompute = staged, recompute
        self.objective_ms = objective_ms
        self.windows = windows
        self.keeps = keeps
        self.rule = TokenRule(VOCAB, repetition=0.5, reads=keeps)
        self.task_group = task_group
        self.shm_dir = shm_dir
        self.num_blocks = num_blocks
        self.run_ahead = run_ahead
        self.max_running = max_running
        self.zero_retention = zero_retention
        self.dice = random.Random(seed)
        self.broker = MemoryBroker()
        self.processes: dict[str, Process] = {}
        self.outcomes: list[Outcome] = []
        self._born = 0

    # -- processes

    async def start(self, role: Role, *, name: str = "") -> str:
        """Start a worker and return its id; it may still be loading."""
        self._born += 1
        name = name or f"{role}-{self._born}"
        bus = self.broker.connect(name)
        process = Process(self._actor(role, name, bus), bus)
        self.processes[name] = process
        await self.task_group.start(self._run, process)
        return name

    async def _run(self, process: Process, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        try:
            with process.scope:
                await process.actor.run(task_status=task_status)
        except* RunnerLost:
            self.processes = {name: other for name, other in self.processes.items() if other is not process}
        finally:
            process.ended.set()

    def _actor(self, role: Role, name: str, bus: MemoryBus) -> Actor:
        shared: dict[str, Any] = {"worker_id": name, "shm_dir": str(self.shm_dir), "http_port": -1, "model": "simulated"}
        shared["zero_retention"] = self.zero_retention
        clock = time.monotonic
        match role:
            case "gateway":
                config = GatewayConfig(**shared, direct_max_tokens=8, canary=False, slo_ttft_ms=self.objective_ms)
                return GatewayActor(bus=bus, config=config, clock=clock)
            case "prefill":
                config = PrefillConfig(**shared, token_budget=16, max_running=self.max_running)
                return PrefillActor(bus=bus, config=config, open_engine=self._open_engine, clock=clock)
            case "decode":
                config = DecodeConfig(
                    **shared,
                    token_budget=8 + self.max_running,
                    max_running=self.max_running,
                    verify="always",
                    slo_itl_ms=self.objective_ms,
                )
                transport = ShmTransport(str(self.shm_dir))
                made = DecodeActor(bus=bus, config=config, open_engine=self._open_engine, transport=transport, clock=clock)
                return self._wanting_states(made)
            case "draft":
                return DraftActor(bus=bus, config=DraftConfig(**shared), clock=clock)
            case "kvstore":
                return KvstoreActor(bus=bus, config=KvstoreConfig(**shared, capacity_mb=1), clock=clock)

    def _wanting_states(self, worker: DecodeActor) -> DecodeActor:
        make_scheduler = worker.make_scheduler

        def made() -> DecodeScheduler:
            scheduler = make_scheduler()
            scheduler.recompute = lambda sequence: self.recompute
            return scheduler

        worker.make_scheduler = made
        return worker

    def _open_engine(self, segment_name: str, on_progress: Callable[[int, int], None]) -> Engine:
        def memory(group: int, num_blocks: int, retention: Retention) -> GroupMemory:
            segment = Segment.create(
                self.shm_dir,
                group_name(segment_name, group),
                num_blocks=num_blocks,
                block_bytes=BLOCK_TOKENS * BYTES_PER_TOKEN,
                fingerprint=group_name("simulated", group),
            )
            return GroupMemory(segment, retention)

        first = memory(0, self.num_blocks, self.keeps)
        more = [memory(index, num_blocks, retention) for index, (retention, num_blocks) in enumerate(self.windows, 1)]
        runner = SimulatedRunner(
            "instant",
            storage=first.segment.blocks,
            block_tokens=BLOCK_TOKENS,
            max_context=MAX_CONTEXT,
            vocab_size=VOCAB,
            fingerprint="simulated",
            time_scale=0,
            rule=self.rule,
            run_ahead=self.run_ahead,
            more=[(one.segment.blocks, one.retention) for one in more],
        )
        engine = Engine(runner, first, more)
        if self.staged:
            pools = [torch.from_numpy(group.segment.blocks) for group in engine.groups]
            engine.stage = HostStage(pools, STAGE_BYTES)
            for group, staged in zip(engine.groups, engine.stage.groups, strict=True):
                group.staged = staged
        return engine

    def alive(self, role: str) -> list[str]:
        return [name for name, process in self.processes.items() if process.actor.role == role]

    async def kill(self, name: str) -> None:
        """kill -9: the process says nothing more, to anyone."""
        process = self.processes.pop(name)
        process.bus.kill()
        process.scope.cancel()
        await process.ended.wait()

    async def terminate(self, name: str) -> None:
        """SIGTERM: the process drains and ends."""
        process = self.processes.pop(name)
        process.actor.begin_drain()
        await process.ended.wait()
        await process.bus.close()

    async def end(self) -> None:
        for name in list(self.processes):
            process = self.processes.pop(name)
            await process.actor.stop()
            await process.bus.close()

    # -- requests

    @property
    def gateway(self) -> GatewayActor:
        actor = self.processes[self.alive("gateway")[0]].actor
        assert isinstance(actor, GatewayActor)
        return actor

    def submit(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 16,
        seed: int = 1,
        deadline_s: float = 600,
        cancel_after_s: float | None = None,
        tenant: str = "",
        salt: bytes = b"",
        background: bool = False,
        grammar: str = "",
    ) -> Outcome:
        sampling = SamplingParams(seed=seed, max_tokens=max_tokens, grammar=grammar)
        outcome = Outcome(prompt, sampling, self.rule, tenant=tenant, asked_at=time.monotonic())
        self.outcomes.append(outcome)
        request = GenerationRequest(
            id=f"request-{len(self.outcomes)}",
            prompt=prompt,
            sampling=sampling,
            deadline_s=deadline_s,
            tenant=tenant,
            salt=salt,
            background=background,
        )
        self.task_group.start_soon(self._read, self.gateway, request, outcome, cancel_after_s)
        return outcome

    async def _read(
        self, gateway: GatewayActor, request: GenerationRequest, outcome: Outcome, cancel_after_s: float | None
    ) -> None:
        try:
            stream = gateway.generate(request)
        except PenstockError as error:
            outcome.error, outcome.ended = error, True
            return
        with anyio.move_on_after(cancel_after_s):
            while not outcome.ended:
                output = await stream.next()
                if output.tokens and not outcome.tokens:
                    outcome.first_token_at = time.monotonic()
                outcome.tokens += output.tokens
                outcome.finish, outcome.error = output.finish, output.error
                outcome.cached_tokens = max(outcome.cached_tokens, output.cached_tokens)
                outcome.ended = output.finish is not None or output.error is not None
        if not outcome.ended:
            stream.cancel()
            outcome.ended = True

    # -- promises

    def check_pools(self) -> None:
        """Every pool's books balance, whatever is going on."""
        for process in self.processes.values():
            if isinstance(process.actor, EngineWorker) and process.actor.loaded:
                process.actor.cache.check()
            if isinstance(process.actor, KvstoreActor):
                arenas = process.actor.arenas
                assert arenas.memory_bytes <= arenas.capacity_bytes
                for arena in arenas.values():
                    arena.index.check()

    def held(self) -> list[str]:
        """What is still held on workers; empty when everything was given back."""
        held = []
        for name, process in self.processes.items():
            usage = process.actor.presence("ready").kv
            if usage.owned or usage.leased:
                held.append(f"{name}: {usage}")
            if isinstance(process.actor, EngineWorker) and (requests := process.actor.held.keys()):
                held.append(f"{name}: {requests}")
            if isinstance(process.actor, DecodeActor) and process.actor.loaded:
                aside = sum(group.pool.num_aside for group in process.actor.pool.groups)
                if len(process.actor.arrivals) or aside:
                    held.append(f"{name}: {len(process.actor.arrivals)} streams, {aside} blocks set aside")
            if isinstance(process.actor, PrefillActor) and process.actor.loaded and len(process.actor.streams):
                held.append(f"{name}: {len(process.actor.streams)} streams")
            if isinstance(process.actor, DecodeActor) and process.actor.loaded and process.actor.proposers.num_sequences:
                held.append(f"{name}: {process.actor.proposers.num_sequences} sequences that are speculated for")
            if isinstance(process.actor, DraftActor) and (mirrors := len(process.actor.proposer)):
                held.append(f"{name}: {mirrors} mirrors")
        return held

    async def all_ended(self, within_s: float = 700) -> None:
        ends_at = time.monotonic() + within_s
        while not all(outcome.ended for outcome in self.outcomes):
            assert time.monotonic() < ends_at, [outcome for outcome in self.outcomes if not outcome.ended]
            await anyio.sleep(0.05)

    async def clean(self, within_s: float) -> None:
        ends_at = time.monotonic() + within_s
        while held := self.held():
            assert time.monotonic() < ends_at, held
            await anyio.sleep(0.05)
        self.check_pools()

    def check_outcomes(self) -> None:
        """No client ever sees a wrong token, whatever happened; and who saw the end saw all of it."""
        for outcome in self.outcomes:
            assert outcome.tokens == outcome.expected[: len(outcome.tokens)]
            if outcome.finish is not None:
                longest = min(MAX_CONTEXT, self.keeps.longest(self.num_blocks - 1, BLOCK_TOKENS))
                room = max(longest - len(outcome.prompt), 1)  # the first token is of prefill
                assert outcome.finish == "length"
                assert len(outcome.tokens) == min(outcome.sampling.max_tokens, room)
