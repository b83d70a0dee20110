"""Real gateways and workers with simulated engines in one process, on the in-memory bus; and other ways of routing."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec

from common.cache.prefix import hash_packed, keyed_hash
from common.engine.engine import Engine, GroupMemory
from common.engine.simulated.runner import BYTES_PER_TOKEN, SimulatedRunner
from common.protocol.handles import WorkerRef
from common.protocol.messages import SamplingParams
from common.testing.memory_bus import MemoryBroker
from common.transfer.segment import Segment
from common.transfer.shm import ShmTransport
from common.worker.actor import EngineWorker
from services.decode.actor import DecodeActor
from services.decode.config import DecodeConfig
from services.gateway.actor import GatewayActor
from services.gateway.config import GatewayConfig
from services.gateway.known_prefixes import KnownPrefixes
from services.gateway.prefix_memory import PrefixMemory
from services.gateway.prompt_chain import ChainCache, Prompt
from services.gateway.requests import GenerationRequest
from services.gateway.router import Choice, Job, Router
from services.prefill.actor import PrefillActor
from services.prefill.config import PrefillConfig

Routing = Literal["events", "all-knowing", "memory", "round-robin"]
BLOCK_TOKENS = 16
VOCAB = 32_000
MAX_CONTEXT = 8192
PROFILE = "h200-llama-8b"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A site. `num_blocks`: of each prefill worker's cache. `time_scale`: of the simulated engines."""

    routing: Routing
    num_prefill: int = 4
    num_decode: int = 2
    num_gateways: int = 1
    num_blocks: int = 2000
    time_scale: float = 1.0


class Truth:
    """What every worker really holds now, and what gateways have sent there in the last seconds, for all of them."""

    def __init__(self) -> None:
        self.workers: dict[WorkerRef, EngineWorker] = {}
        self.ids: dict[WorkerRef, int] = {}
        self.sent = KnownPrefixes(65536, 0)


class AllKnowing(KnownPrefixes):
    """What a gateway would know to which everything were told at once."""

    def __init__(self, truth: Truth) -> None:
        super().__init__(65536, 0)
        self._truth = truth
        self._serials: dict[WorkerRef, int] = {}
        self._sent_here = (PrefixMemory(65536), PrefixMemory(65536))

    def prompt(self, packed: bytes, salt: bytes) -> Prompt | None:
        return _Packed(packed, salt)

    def joined(self, ref: WorkerRef, serial: int) -> None:
        self._serials[ref] = serial
        self._truth.ids.setdefault(ref, len(self._truth.ids))

    def remember(self, keys: Sequence[int], serial: int) -> None:
        ref = next(ref for ref, known in self._serials.items() if known == serial)
        self._truth.sent._sent.remember(keys, self._truth.ids[ref])

    def tick(self, now: float) -> None:
        self._truth.sent.tick(now)

    def match(self, keys: Sequence[int], prompt: Prompt | None) -> dict[int, int]:
        assert isinstance(prompt, _Packed)
        truth, sent = self._truth, dict[int, int]()
        for memory in (truth.sent._sent_before, truth.sent._sent):
            sent |= memory.match(keys)
        found: dict[int, int] = {}
        for ref, serial in self._serials.items():
            held = len(truth.workers[ref].pool.match(prompt.hashes)[0]) * BLOCK_TOKENS
            if tokens := max(held, sent.get(truth.ids[ref], 0)):
                found[serial] = tokens
        return found


class _Packed(Prompt):
    def __init__(self, packed: bytes, salt: bytes) -> None:
        super().__init__(packed, salt, ChainCache())
        keyed = keyed_hash(BLOCK_TOKENS, fingerprint="simulated", salt=salt)
        self.hashes = hash_packed(keyed, packed[:-4], BLOCK_TOKENS)


def round_robin(router: Router) -> Callable[[Job], Choice | None]:
    """Every worker with room in turn, whatever it holds and has to do."""
    turns = itertools.count()

    def choose(job: Job) -> Choice | None:
        turn = next(turns)
        prefill = [worker for worker in router.prefill.members.values() if worker.spare > 0]
        decode = [worker for worker in router.decode.members.values() if worker.spare > 0]
        if not prefill or not decode:
            return None
        return Choice(prefill[turn % len(prefill)].ref, decode[turn % len(decode)].ref, job.num_tokens)

    return choose


class Site:
    """Running gateways and workers."""

    def __init__(self, plan: Plan, shm_dir: Path) -> None:
        self.plan = plan
        self.shm_dir = shm_dir
        self.broker = MemoryBroker()
        self.truth = Truth()
        self.prefill: list[PrefillActor] = []
        self.gateways: list[GatewayActor] = []
        self._numbers = itertools.count()

    async def start(self, group: anyio.abc.TaskGroup) -> None:
        shared: dict[str, Any] = {"shm_dir": str(self.shm_dir), "http_port": -1, "model": "simulated", "log_level": "error"}
        plan = self.plan
        for number in range(plan.num_prefill):
            config = PrefillConfig(**shared, worker_id=f"prefill-{number}", token_budget=4096, max_running=32)
            prefill = PrefillActor(bus=self.broker.connect("prefill"), config=config, open_engine=self._opener(plan.num_blocks))
            self.prefill.append(prefill)
            await group.start(prefill.run)
        decodes: list[EngineWorker] = []
        for number in range(plan.num_decode):
            config = DecodeConfig(
                **shared, worker_id=f"decode-{number}", token_budget=2048, max_running=128, speculation_tokens=0, lookup="off"
            )
            transport = ShmTransport(str(self.shm_dir))
            bus, opener = self.broker.connect("decode"), self._opener(40_000)
            decodes.append(DecodeActor(bus=bus, config=config, open_engine=opener, transport=transport))
            await group.start(decodes[-1].run)
        self.truth.workers = {worker.ref: worker for worker in (*self.prefill, *decodes)}
        for number in range(plan.num_gateways):
            config = GatewayConfig(
                **shared,
                worker_id=f"gateway-{number}",
                direct_max_tokens=-1,
                canary=False,
                kv_index_blocks=2_000_000 if plan.routing == "events" else 0,
            )
            gateway = GatewayActor(bus=self.broker.connect("gateway"), config=config)
            router = gateway.cores[0].router
            if plan.routing == "all-knowing":
                router.prefixes = AllKnowing(self.truth)
            elif plan.routing == "round-robin":
                router.choose = round_robin(router)  # pyright: ignore[reportAttributeAccessIssue]
            self.gateways.append(gateway)
            await group.start(gateway.run)
        while not all(self._is_whole(gateway.cores[0].router) for gateway in self.gateways):  # noqa: ASYNC110
            await anyio.sleep(0.05)
        await anyio.sleep(1.5)  # until workers without changes have been heard

    def _is_whole(self, router: Router) -> bool:
        return (router.prefill.usable, router.decode.usable) == (self.plan.num_prefill, self.plan.num_decode)

    def _opener(self, num_blocks: int) -> Callable[[str, Callable[[int, int], None]], Engine]:
        def open_engine(name: str, on_progress: Callable[[int, int], None]) -> Engine:
            block_bytes = BLOCK_TOKENS * BYTES_PER_TOKEN
            segment = Segment.create(
                self.shm_dir, name, num_blocks=num_blocks, block_bytes=block_bytes, fingerprint="simulated"
            )
            runner = SimulatedRunner(
                PROFILE,
                storage=segment.blocks,
                block_tokens=BLOCK_TOKENS,
                max_context=MAX_CONTEXT,
                vocab_size=VOCAB,
                fingerprint="simulated",
                time_scale=self.plan.time_scale,
            )
            return Engine(runner, GroupMemory(segment))

        return open_engine

    async def ask(self, prompt: list[int], max_tokens: int) -> int:
        """Run a request to its end, at the gateways in turn; return how many of its tokens were cached.

        :raises PenstockError: what it ended with.
        """
        number = next(self._numbers)
        gateway = self.gateways[number % len(self.gateways)]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        stream = gateway.generate(GenerationRequest(id=f"r{number}", prompt=prompt, sampling=sampling, deadline_s=300))
        cached = 0
        while True:
            output = await stream.next()
            cached = max(cached, output.cached_tokens)
            if output.error is not None:
                raise output.error
            if output.finish is not None:
                return cached


@asynccontextmanager
async def running(plan: Plan, folder: Path) -> AsyncIterator[Site]:
    """A site whose gateways know all workers."""
    async with anyio.create_task_group() as group:
        site = Site(plan, folder)
        await site.start(group)
        yield site
        group.cancel_scope.cancel()


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """Of requests that share prefixes: tokens of prompts, those cached, and of each prefill worker the prompts it got."""

    prompt_tokens: int
    cached_tokens: int
    by_worker: list[int]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


async def share_prefixes(
    site: Site, *, num_prefixes: int, prefix_tokens: int, tail_tokens: int, num_requests: int, per_s: float, seed: int
) -> Shared:
    """Requests that come at random times, each with one of the prefixes and an ending of its own."""
    dice = random.Random(seed)
    prefixes = [[dice.randrange(3, VOCAB) for _ in range(prefix_tokens)] for _ in range(num_prefixes)]
    cached: list[int] = []

    async def one(prompt: list[int]) -> None:
        cached.append(await site.ask(prompt, 4))

    async with anyio.create_task_group() as group:
        due = time.perf_counter()
        for _ in range(num_requests):
            due += dice.expovariate(per_s)
            await anyio.sleep(max(0.0, due - time.perf_counter()))
            tail = [dice.randrange(3, VOCAB) for _ in range(tail_tokens)]
            group.start_soon(one, [*dice.choice(prefixes), *tail])
    size = prefix_tokens + tail_tokens
    queries = [int(worker.counters.prefix_queries._value.get()) for worker in site.prefill]
    return Shared(
        prompt_tokens=num_requests * size, cached_tokens=sum(cached), by_worker=[tokens // size for tokens in queries]
    )


async def share_nothing(site: Site, *, clients: int, prompt_tokens: int, seconds: float, seed: int) -> float:
    """Return requests a second of clients in a closed loop whose prompts have nothing in common."""
    dice, ended = random.Random(seed), 0
    begin = time.perf_counter() + 2.0  # not counted: everyone begins at once
    end = begin + seconds

    async def client() -> None:
        nonlocal ended
        while time.perf_counter() < end:
            await site.ask([dice.randrange(3, VOCAB) for _ in range(prompt_tokens)], 4)
            ended += begin <= time.perf_counter() < end

    async with anyio.create_task_group() as group:
        for _ in range(clients):
            group.start_soon(client)
    return ended / seconds
