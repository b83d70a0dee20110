"""KV on disk, with real processes: a prefix is there after everything was stopped, and no kill in the middle of a write changes
a token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from common.models.source import ModelFiles
from common.protocol.cache_messages import KvTier
from tests.chaos.site import Job, simulated_jobs
from tests.e2e.stack import Reply, Stack
from tests.fixtures.nats import LocalNatsServer

pytestmark = pytest.mark.timeout(300)

PREFIX_TOKENS = 1000
WITHIN_S = 60


def disk_of(stack: Stack, name: str = "kvstore-0") -> KvTier:
    return stack.presence(name).tiers[1]


async def written(stack: Stack, at_least: int, name: str = "kvstore-0") -> None:
    """The kvstore has so many blocks on disk, and none to write."""
    with anyio.fail_after(WITHIN_S):
        while not (disk_of(stack, name).blocks >= at_least and disk_of(stack, name).queued_blocks == 0):
            await anyio.sleep(0.05)


async def read_from_disk(stack: Stack, at_least: int) -> None:
    """The kvstore has said, with a heartbeat, that so many blocks were read from its disk."""
    with anyio.fail_after(WITHIN_S):
        while disk_of(stack).hit_blocks < at_least:
            await anyio.sleep(0.05)


async def start_all(stack: Stack, kv: Path) -> None:
    """All prompts go to the prefill worker, so that the decode worker's own pool answers none of them."""
    await stack.start("gateway", "--direct-max-tokens", "-1")
    await stack.start("prefill")
    await stack.start("decode")
    await stack.start("kvstore", "--kv-disk", str(kv), "--kv-disk-gb", "1")
    await stack.ready()


def cached_tokens(reply: Reply) -> int:
    assert reply.error is None and reply.usage is not None, reply
    return reply.usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
async def test_a_prefix_outlives_its_prefill_worker_and_then_everything(
    nats_server_factory: Callable[[], LocalNatsServer], tmp_path: Path, smollm2: ModelFiles
) -> None:
    chance = random.Random(3)
    prefix = [chance.randrange(1000, 30_000) for _ in range(PREFIX_TOKENS)]
    prompts = [prefix + [chance.randrange(1000, 30_000) for _ in range(20)] for _ in range(3)]
    kv = tmp_path / "kv"
    flags = ("--model", smollm2.name)
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
    with_salt = {"max_tokens": 8, "ignore_eos": True}

    nats = nats_server_factory()
    async with Stack(nats.url, tmp_path / "first", flags=flags) as stack:
        await start_all(stack, kv)
        # under another salt nothing of it is cached: what comes without any cache
        cold = [await stack.complete(prompt, **with_salt, cache_salt=f"s{i}") for i, prompt in enumerate(prompts)]
        assert [cached_tokens(reply) for reply in cold] == [0, 0, 0]
        first = await stack.complete(prompts[0], **with_salt)
        assert (cached_tokens(first), first.text) == (0, cold[0].text)
        await written(stack, 4 * (PREFIX_TOKENS // 16))
        stack.kill("prefill-0")
        name = await stack.start("prefill")
        await stack.ready(name)
        again = await stack.complete(prompts[1], **with_salt)
        assert (cached_tokens(again), again.text) == (PREFIX_TOKENS // 16 * 16, cold[1].text)
        await written(stack, 4 * (PREFIX_TOKENS // 16))
    nats.stop()

    nats = nats_server_factory()
    async with Stack(nats.url, tmp_path / "second", flags=flags) as stack:
        await start_all(stack, kv)
        last = await stack.complete(prompts[2], **with_salt)
        assert (cached_tokens(last), last.text) == (PREFIX_TOKENS // 16 * 16, cold[2].text)
        await read_from_disk(stack, PREFIX_TOKENS // 16)
        assert disk_of(stack).damaged_blocks == 0
        other = await stack.complete(prompts[2], **with_salt, cache_salt="nobody's")
        assert (cached_tokens(other), other.text) == (0, cold[2].text), "not under another salt, in any tier"


@pytest.mark.slow
async def test_a_store_killed_while_it_writes_never_changes_a_token(
    nats_server: str, tmp_path: Path, smollm2: ModelFiles
) -> None:
    """Five kills, each while blocks are being written. Answers are known beforehand."""
    chance = random.Random(11)
    asked = simulated_jobs(smollm2, 11, tokens=range(3, 6))  # it is prompts that are written
    jobs = list(itertools.islice((job for job in asked if len(job.body["prompt"]) >= 200), 16))
    slow = ("--profile", "b200-llama-70b", "--time-scale", "1")  # reading a prefix takes less than computing it
    engine = ("--engine", "simulated", *slow, "--kv-cache-mb", "8")
    async with Stack(nats_server, tmp_path, flags=("--model", smollm2.name), engine_flags=engine) as stack:
        await stack.start("gateway", "--direct-max-tokens", "-1")
        await stack.start("decode")
        hits = 0

        async def ask(job: Job) -> None:
            reply = await stack.complete(**job.body)
            assert (reply.error, reply.text) == (None, job.expected())

        for number in range(5):
            store = await stack.start("kvstore", "--kv-disk", str(tmp_path / "kv"), name=f"kvstore-{number}")
            prefill = await stack.start("prefill", name=f"prefill-{number}")
            await stack.ready()
            for job in chance.sample(jobs, 8):
                await ask(job)
            hits += disk_of(stack, store).hit_blocks
            await anyio.sleep(chance.random() * 0.05)
            stack.kill(store)
            stack.kill(prefill)
        store = await stack.start("kvstore", "--kv-disk", str(tmp_path / "kv"))
        await stack.start("prefill")
        await stack.ready()
        for job in jobs:
            await ask(job)
        await anyio.sleep(0.5)
        assert hits + disk_of(stack, store).hit_blocks > 100, "what earlier stores had written was used"
        assert disk_of(stack, store).damaged_blocks == 0, "and a kill tears nothing: the system keeps what was written"
