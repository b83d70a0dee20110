"""What scheduler tests share: generations, a pool and a simulated runner whose tokens give away any wrong KV."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.cache.retention import KEEP_ALL, Retention
from common.engine.plan import StepPlan, StepResult
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.engine.simulated.runner import BYTES_PER_TOKEN, SimulatedRunner
from common.protocol import tokens as token_bytes
from common.protocol.handles import WorkerRef
from common.protocol.messages import Generation, SamplingParams

GATEWAY = WorkerRef("gateway", "gateway-1", 1)
BLOCK_TOKENS = 4
VOCAB = 1000
MAX_CONTEXT = 256


def generation(request: str, prompt: list[int], *, attempt: int = 0, **sampling: Any) -> Generation:
    return Generation(
        request=request,
        attempt=attempt,
        gateway=GATEWAY,
        tokens=token_bytes.pack(prompt),
        prompt_tokens=len(prompt),
        sampling=SamplingParams(**dict[str, Any](seed=7, max_tokens=8) | sampling),
        deadline_ms=1 << 60,
    )


def sequence(request: str, prompt: list[int], **options: Any) -> Sequence:
    return Sequence.of(generation(request, prompt, **options), vocab_size=VOCAB, max_context=MAX_CONTEXT)


class Bench:
    """A pool, its cache and a runner over the same blocks."""

    def __init__(self, num_blocks: int = 64, *, windows: tuple[tuple[Retention, int], ...] = ()) -> None:
        """`windows`: what cache groups beside the one that keeps everything keep, and how many blocks each has."""
        groups = [(KEEP_ALL, num_blocks), *windows]
        self.pool = GroupedPool(*(PoolGroup(BlockPool(count, BLOCK_TOKENS), retention) for retention, count in groups))
        self.cache = SequenceCache(self.pool, fingerprint="test")
        self.storage = [np.full((count, BLOCK_TOKENS * BYTES_PER_TOKEN), 0xA5, np.uint8) for _, count in groups]
        self.runner = SimulatedRunner(
            "instant",
            storage=self.storage[0],
            block_tokens=BLOCK_TOKENS,
            max_context=MAX_CONTEXT,
            vocab_size=VOCAB,
            fingerprint="test",
            time_scale=0,
            more=[(storage, retention) for storage, (retention, _) in zip(self.storage[1:], windows, strict=True)],
        )

    def expected(self, s: Sequence) -> list[int]:
        """The tokens that `s` must have generated, as many as it has."""
        prompt = token_bytes.unpack(s.generation.tokens)[: s.generation.prompt_tokens]
        return self.runner.expected_tokens(prompt, s.sampling, s.num_outputs)

    def all_given_back(self) -> bool:
        self.cache.check()
        usage = self.pool.usage()
        return usage.owned == usage.leased == 0


Done = TypeVar("Done")


class Scheduler(Protocol[Done]):
    def plan(self, now: float) -> StepPlan | None: ...
    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Done]: ...


class Pipeline(Generic[Done]):
    """Steps a scheduler as a worker does whose runner runs ahead: plans are made before earlier ones have run."""

    def __init__(self, bench: Bench, scheduler: Scheduler[Done], depth: int = 2) -> None:
        self.bench = bench
        self.scheduler = scheduler
        self.depth = depth
        self.flights: deque[StepPlan] = deque()

    def fill(self) -> None:
        while len(self.flights) < self.depth and (plan := self.scheduler.plan(0.0)) is not None:
            self.flights.append(plan)

    def step(self) -> list[Done] | None:
        """Run and commit the oldest step; None when there was nothing to run."""
        self.fill()
        if not self.flights:
            return None
        plan = self.flights.popleft()
        done = self.scheduler.commit(plan, self.bench.runner.execute(plan), 0.0)
        self.bench.cache.check()
        return done

    def run(self) -> list[Done]:
        every: list[Done] = []
        for _ in range(10_000):
            done = self.step()
            if done is None:
                return every
            every += done
        raise AssertionError("the scheduler never came to rest")
