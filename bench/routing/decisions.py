"""How long a routing decision takes among a million indexed blocks, and what a block takes of memory."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from common.cache.contents import HASH_TYPE
from common.cache.prefix import hash_chain, short_hashes
from common.protocol.handles import WorkerRef
from common.protocol.kv_events import KvEvents, KvLayout, KvSnapshot
from common.protocol.messages import Presence, SamplingParams, decode, encode
from services.gateway.actions import Limits
from services.gateway.health import Health
from services.gateway.placement import Placement
from services.gateway.requests import GenerationRequest, Request
from services.gateway.router import Router
from services.gateway.worker_blocks import Arriving

BLOCK_TOKENS = 16
LAYOUT = KvLayout("bench", BLOCK_TOKENS, [(0, 0)])
HASHES_PER_MESSAGE = 4096
LIMITS = Limits(
    stall_s=1, max_fetches=3, max_attempts=4, max_losses=3, placing_timeout_s=9, prefill_timeout_s=120, slow_reader_timeout_s=30
)
ME = WorkerRef("gateway", "gateway-0", 1)


class Figures(NamedTuple):
    """Microseconds of a decision; `bytes_per_block`: by the process's resident memory; `event_us`: to apply a changed block;
    `snapshot_ms`: the longest turn of the event loop, and all of them, for a snapshot of a quarter of the blocks."""

    name: str
    p50_us: float
    p99_us: float


class Memory(NamedTuple):
    num_blocks: int
    bytes_per_block: float
    event_us: float
    snapshot_part_ms: float
    snapshot_ms: float


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 — a pseudo file
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompt(length: int, first: int) -> list[int]:
    return [(first * 7919 + index * 31) % 30_000 for index in range(length)]


class Scene:
    """A gateway's placement between prefill workers, whose caches hold `num_blocks` blocks together, and a decode worker."""

    def __init__(self, *, num_blocks: int, num_prefill: int, prefixes: Sequence[list[int]]) -> None:
        self.prefill = [WorkerRef("prefill", f"prefill-{number}", 1) for number in range(num_prefill)]
        everyone = [*self.prefill, WorkerRef("decode", "decode-0", 1)]
        presences = [
            Presence(
                worker=worker,
                state="ready",
                model="m",
                fingerprint="bench",
                host="h",
                credits=1 << 20,
                prefill_tokens_per_s=30_000.0,
                step_ms=10.0,
            )
            for worker in everyone
        ]
        self.router = Router(direct_max_tokens=64, index_blocks=2 * num_blocks)
        self.placement = Placement(self.router, Health(trusting=True))
        self.placement.refresh(presences, 0.0)
        self.index = self.router.prefixes.index
        self._numbers = 0
        gc.collect()
        before = resident_bytes()
        self.event_us = self._fill(everyone, num_blocks, prefixes)
        gc.collect()
        gc.freeze()  # as services do once they have started
        self.bytes_per_block = (resident_bytes() - before) / self.index.num_blocks

    def _fill(self, everyone: Sequence[WorkerRef], num_blocks: int, prefixes: Sequence[list[int]]) -> float:
        """Tell of each prefix at a worker or two, and of as many other blocks. Returns microseconds a block."""
        dice, spent = random.Random(1), 0.0
        for worker in everyone:
            self.index.apply(KvEvents(worker=worker, number=0, layout=LAYOUT), 0)
        numbers = dict.fromkeys(everyone, 0)

        def tell(worker: WorkerRef, hashes: Sequence[int]) -> float:
            numbers[worker] += 1
            stored = np.array(hashes, HASH_TYPE).tobytes()
            data = encode(KvEvents(worker=worker, number=numbers[worker], layout=LAYOUT, stored=[stored]))
            began = time.perf_counter()
            message = decode(data)
            assert isinstance(message, KvEvents)
            self.index.apply(message, 0)
            return time.perf_counter() - began

        for number, prefix in enumerate(prefixes):
            chain = short_hashes(hash_chain(prefix, BLOCK_TOKENS, fingerprint="bench", salt=b""))
            for home in {number % len(self.prefill), (number * 3 + 1) % len(self.prefill)}:
                tell(self.prefill[home], chain)
        told = 0
        while self.index.num_blocks < num_blocks:
            worker = self.prefill[told % len(self.prefill)]
            spent += tell(worker, [dice.getrandbits(60) for _ in range(HASHES_PER_MESSAGE)])
            told += 1
        return 1e6 * spent / max(1, told * HASHES_PER_MESSAGE)

    def decide(self, tokens: list[int]) -> float:
        """Return seconds from a tokenized prompt to the choice of its workers: keys, hashes, line, costs. Nothing is sent."""
        self._numbers += 1
        sampling = SamplingParams(max_tokens=16)
        asked = GenerationRequest(id=f"r{self._numbers}", prompt=tokens, sampling=sampling, deadline_s=60)
        request = Request(asked, wire_id=asked.id, gateway=ME, limits=LIMITS, now=0.0, wall_ms=0)
        began = time.perf_counter()
        self.placement.join(request, 0.0)
        job = self.placement._job(request, 0.0)
        choice = self.router.choose(job)
        took = time.perf_counter() - began
        assert choice is not None
        self.placement.forget(request)
        return took

    def snapshot(self) -> tuple[float, float]:
        """Return milliseconds of the longest part, and of all, of a snapshot of a worker's share of the blocks."""
        dice = random.Random(2)
        count = self.index.num_blocks // len(self.prefill)
        hashes = np.array([dice.getrandbits(60) for _ in range(count)], HASH_TYPE).tobytes()
        arriving, parts = Arriving(0, count), list[float]()
        while not arriving.is_complete:
            part = hashes[8 * arriving.offset : 8 * (arriving.offset + 16384)]
            data = encode(KvSnapshot(worker=ME, number=1, layout=LAYOUT, counts=[count], offset=arriving.offset, hashes=part))
            began = time.perf_counter()
            message = decode(data)
            assert isinstance(message, KvSnapshot)
            arriving.add(message)
            parts.append(1000 * (time.perf_counter() - began))
        return max(parts), sum(parts)


def measure(*, num_blocks: int, num_prefill: int, prompt_tokens: int, samples: int) -> tuple[list[Figures], Memory]:
    """The figures of each kind of prompt, and of memory."""
    prefixes = [prompt(prompt_tokens, number) for number in range(32)]
    scene = Scene(num_blocks=num_blocks, num_prefill=num_prefill, prefixes=prefixes)
    dice = random.Random(3)

    def tail() -> list[int]:
        return [dice.randrange(30_000) for _ in range(64)]

    def shared() -> list[int]:
        return [*prefixes[dice.randrange(32)], *tail()]

    def unknown() -> list[int]:
        return [dice.randrange(30_000) for _ in range(prompt_tokens + 64)]

    def unhashed() -> list[int]:
        scene.router.prefixes._cache._segments.clear()
        return shared()

    kinds: list[tuple[str, Callable[[], list[int]]]] = [
        ("prefix that workers hold", shared),
        ("the same, not hashed lately", unhashed),
        ("prompt that nobody holds", unknown),
    ]
    figures: list[Figures] = []
    for name, make in kinds:
        times = sorted(scene.decide(make()) for _ in range(samples))
        figures.append(Figures(name, 1e6 * median(times), 1e6 * times[int(0.99 * len(times))]))
    longest_ms, all_ms = scene.snapshot()
    return figures, Memory(scene.index.num_blocks, scene.bytes_per_block, scene.event_us, longest_ms, all_ms)
