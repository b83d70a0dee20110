"""Tenants share a kvstore by their weights: real processes, from the client's key to what is found after a restart."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from common.models.source import ModelFiles
from common.protocol.cache_messages import KvTier
from tests.e2e.stack import ROOT, Stack
from tests.fixtures.nats import LocalNatsServer

pytestmark = pytest.mark.timeout(120)

KEYS = {"acme": "pk-acme-0123456789", "zoo": "pk-zoo-0123456789"}
BLOCK_TOKENS = 16
CAPACITY_BLOCKS = 256
"""A simulated block takes a page of the store's mebibyte."""
KEPT_BLOCKS = 60


def memory_of(stack: Stack) -> KvTier:
    return stack.presence("kvstore-0").tiers[0]


async def held_in_memory(stack: Stack, keys: Path) -> dict[str, int]:
    """Blocks of each tenant, as `penstock status` tells an operator who has the file of keys."""
    words = ("status", "--json", "--tenants", "--api-keys", str(keys), "--nats-url", stack.nats_url)
    ended = await anyio.run_process([sys.executable, "-m", "common.cli", *words], cwd=ROOT)
    (store,) = [worker for worker in json.loads(ended.stdout) if worker["worker"]["role"] == "kvstore"]
    assert {(one["tier"], one["model"]) for one in store["held"]} == {("memory", stack.presence("prefill-0").model)}
    return {one["name"]: one["blocks"] for one in store["held"]}


async def cached_tokens(stack: Stack, tenant: str, prompt: list[int]) -> int:
    stack.client.headers["authorization"] = f"Bearer {KEYS[tenant]}"
    reply = await stack.complete(prompt, max_tokens=1, ignore_eos=True)
    assert reply.error is None and reply.usage is not None, reply
    return reply.usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
async def test_one_tenants_flood_does_not_take_what_another_has_less_than_its_share_of(
    nats_server_factory: Callable[[], LocalNatsServer], tmp_path: Path, smollm2: ModelFiles
) -> None:
    keys = tmp_path / "keys.toml"
    told = "".join(f"[tenants.{tenant}]\n" for tenant in KEYS)
    for tenant, key in KEYS.items():
        told += f'[[keys]]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\ntenant = "{tenant}"\n'
    keys.write_text(told)
    nats = nats_server_factory()
    flags, engine = ("--model", smollm2.name), ("--engine", "simulated", "--block-tokens", str(BLOCK_TOKENS))
    async with Stack(nats.url, tmp_path, flags=flags, engine_flags=engine) as stack:
        await stack.start("gateway", "--api-keys", str(keys), "--direct-max-tokens", "-1")
        await stack.start("prefill")
        await stack.start("decode")
        await stack.start("kvstore", "--capacity-mb", "1")
        stack.client.headers["authorization"] = f"Bearer {KEYS['acme']}"
        await stack.ready()
        mine = [7 + i % 999 for i in range(KEPT_BLOCKS * BLOCK_TOKENS + 5)]
        assert await cached_tokens(stack, "acme", mine) == 0
        with anyio.fail_after(30):
            while memory_of(stack).blocks < KEPT_BLOCKS:
                await anyio.sleep(0.05)
            for flood in range(12):
                await cached_tokens(stack, "zoo", [2000 + flood] * (KEPT_BLOCKS * BLOCK_TOKENS + 5))
            while memory_of(stack).blocks < CAPACITY_BLOCKS - 2 or memory_of(stack).evicted_blocks < 3 * CAPACITY_BLOCKS // 2:
                await anyio.sleep(0.05)
        held = await held_in_memory(stack, keys)
        assert held["acme"] == KEPT_BLOCKS and held["zoo"] > CAPACITY_BLOCKS // 2
        stack.kill("prefill-0")
        await stack.ready(await stack.start("prefill"))
        assert await cached_tokens(stack, "acme", mine) == KEPT_BLOCKS * BLOCK_TOKENS
