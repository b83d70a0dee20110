"""No prefix is found across salts, in any tier: a worker's cache, the kvstore, the gateway's memory of who has what.
In virtual time, with every worker real. A hit with the same salt shows each time that there was something to find."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from common.cache.prefix import hash_chain
from services.decode.actor import DecodeActor
from services.decode.lookup import Lookup
from services.gateway.prefix_memory import prefix_keys
from services.gateway.tenants import salt_of
from tests.chaos.test_one_world import play, prompt
from tests.chaos.world import Outcome, World

ACME, ACME_MINE, ZOO, NOBODY = salt_of("acme", None), salt_of("acme", "mine"), salt_of("zoo", None), salt_of("", None)
OTHERS = (ACME_MINE, ZOO, NOBODY, salt_of("", "mine"), salt_of("zoo", "mine"))
LENGTH = 64


async def ask(world: World, salt: bytes, start: int = 3) -> Outcome:
    outcome = world.submit(prompt(LENGTH, start), max_tokens=4, salt=salt)
    await world.all_ended()
    assert outcome.error is None
    return outcome


@pytest.mark.parametrize("roles", [("decode", "gateway"), ("prefill", "decode", "gateway")], ids=["direct", "prefill"])
def test_a_workers_cache_finds_nothing_across_salts(tmp_path: Path, roles: tuple[str, ...]) -> None:
    async def story(world: World) -> None:
        assert (await ask(world, ACME)).cached_tokens == 0
        for salt in OTHERS:
            assert (await ask(world, salt)).cached_tokens == 0
        assert (await ask(world, ACME)).cached_tokens >= LENGTH - 4

    play(tmp_path, story, roles=roles)


def test_a_decode_workers_lookup_finds_nothing_across_salts(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        outcome = world.submit(prompt(LENGTH), max_tokens=40, salt=ACME)
        await world.all_ended()
        assert outcome.error is None
        decode = world.processes[world.alive("decode")[0]].actor
        assert isinstance(decode, DecodeActor)
        [lookup] = decode.proposers.drafters
        assert isinstance(lookup, Lookup) and lookup.recent is not None
        mine = lookup.recent.of(ACME)
        assert mine is not None and len(mine) == 41, "the answer, and what separates it from the next one"
        assert all(lookup.recent.of(salt) is None for salt in OTHERS)

    play(tmp_path, story, roles=("decode", "gateway"))


def test_the_kvstore_finds_nothing_across_salts(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await ask(world, ACME)
        await anyio.sleep(2)  # offers to the store are made in the background
        for salt in (*OTHERS, ACME):
            await world.kill(world.alive("decode")[0])  # what its own cache held is gone; the store is there
            await world.start("decode")
            await anyio.sleep(5)
            cached = (await ask(world, salt)).cached_tokens
            assert cached >= LENGTH - 8 if salt == ACME else cached == 0
            await anyio.sleep(2)

    play(tmp_path, story, roles=("kvstore", "decode", "gateway"))


def test_the_gateways_memory_finds_nothing_across_salts(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await ask(world, ACME)
        await anyio.sleep(2)  # until the worker has told what it holds
        prefixes = world.gateway.cores[0].router.prefixes
        assert prefixes.index.num_blocks
        packed = b"".join(token.to_bytes(4, "little") for token in prompt(LENGTH))
        assert prefixes.match(prefix_keys(packed, ACME), prefixes.prompt(packed, ACME))
        assert prefixes.match([], prefixes.prompt(packed, ACME))
        for salt in OTHERS:
            assert not prefixes.match(prefix_keys(packed, salt), prefixes.prompt(packed, salt))

    play(tmp_path, story, roles=("decode", "gateway"))


def test_chains_under_different_salts_share_no_hash_from_the_first_block_on() -> None:
    tokens = prompt(LENGTH)
    chains = [hash_chain(tokens, 4, fingerprint="model", salt=salt) for salt in (ACME, *OTHERS)]
    hashes = [each for chain in chains for each in chain]
    assert len(set(hashes)) == len(hashes) == len(chains) * LENGTH // 4
    assert all(len(set(column)) == len(chains) for column in zip(*chains, strict=True))
