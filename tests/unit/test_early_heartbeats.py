"""A worker tells of long prompts at once where several gateways send to it, and not more often than that helps."""

from __future__ import annotations

import time
from collections.abc import Sequence as Sized

import anyio
import pytest
from anyio.abc import TaskGroup

from common.engine.sequence import Sequence
from common.protocol import tokens as token_bytes
from common.protocol.handles import WorkerRef
from common.protocol.messages import Generation, SamplingParams
from common.worker.early_heartbeats import APART_S, LONG_TOKENS, EarlyHeartbeats

pytestmark = pytest.mark.virtual_time


class Worker:
    def __init__(self, task_group: TaskGroup, heard: list[float]) -> None:
        self.task_group, self.heard = task_group, heard
        self.begun_at = time.monotonic()

    def clock(self) -> float:
        return time.monotonic()

    def announce(self) -> None:
        self.heard.append(round(self.clock() - self.begun_at, 3))


def prompt(gateway: str, num_tokens: int = LONG_TOKENS) -> Sequence:
    generation = Generation(
        request=f"of-{gateway}",
        attempt=1,
        gateway=WorkerRef("gateway", gateway, 1),
        tokens=token_bytes.pack([3] * num_tokens),
        prompt_tokens=num_tokens,
        sampling=SamplingParams(),
        deadline_ms=0,
    )
    return Sequence.of(generation, vocab_size=10, max_context=2 * LONG_TOKENS)


async def told(came: Sized[tuple[float, Sequence]]) -> list[float]:
    """When the worker says something, of prompts that come at these seconds."""
    heard: list[float] = []
    async with anyio.create_task_group() as group:
        worker = Worker(group, heard)
        early = EarlyHeartbeats(worker)
        for at, sequence in came:
            await anyio.sleep(worker.begun_at + at - worker.clock())
            early.admitted(sequence)
    return heard


async def test_one_gateway_knows_what_it_sends() -> None:
    assert await told([(0.1 * n, prompt("a")) for n in range(20)]) == []


async def test_others_hear_of_a_prompt_at_once() -> None:
    assert await told([(0.0, prompt("a")), (1.0, prompt("b")), (2.0, prompt("a"))]) == [1.0, 2.0]


async def test_many_prompts_are_told_of_together() -> None:
    came = [(0.001 * n, prompt("ab"[n % 2])) for n in range(40)]
    assert await told(came) == [0.001, round(0.001 + APART_S, 3)]


async def test_short_prompts_make_no_one_late() -> None:
    assert await told([(0.0, prompt("a")), (1.0, prompt("b", LONG_TOKENS - 1)), (2.0, prompt("a", 1))]) == []


async def test_a_prompt_that_is_computed_already_makes_no_one_late() -> None:
    known = prompt("b")
    known.computed(LONG_TOKENS - 1)
    assert await told([(0.0, prompt("a")), (1.0, known)]) == []


async def test_a_gateway_that_went_away_is_forgotten() -> None:
    assert await told([(0.0, prompt("a")), (1.0, prompt("b")), (12.0, prompt("b")), (13.0, prompt("b"))]) == [1.0]
