"""A gateway hashes a prompt as workers do, as far as somebody needs it."""

from __future__ import annotations

import pytest

from common.protocol import tokens as token_bytes
from services.gateway.prompt_chain import SEGMENT_BLOCKS, ChainCache, Prompt, PromptChain
from tests.unit.kv_told import hashes, tokens


def chain(prompt: list[int], cache: ChainCache | None = None, *, salt: bytes = b"", size: int = 16) -> PromptChain:
    packed = token_bytes.pack(prompt)
    return PromptChain(packed, salt, ChainCache() if cache is None else cache, fingerprint="f", block_tokens=size)


def all_of(one: PromptChain) -> list[int]:
    while one.extend():
        pass
    return one.hashes


@pytest.mark.parametrize("size", [1, 16, 100])
@pytest.mark.parametrize("blocks", [0, 1, 2, 31, 32, 33, 64, 65, 100])
@pytest.mark.parametrize("rest", [0, 1, 2])
def test_the_chain_is_that_of_the_workers_without_the_last_token(size: int, blocks: int, rest: int) -> None:
    prompt, cache = tokens(blocks * size + rest), ChainCache()
    expected = hashes(prompt[:-1], block_tokens=size)
    assert all_of(chain(prompt, cache, size=size)) == expected
    assert all_of(chain(prompt, cache, size=size)) == expected, "with segments that were hashed before"


def test_one_block_is_hashed_of_a_prompt_that_nobody_has() -> None:
    one, cache = chain(tokens(16 * 100)), ChainCache()
    assert one.extend() and len(one.hashes) == 1 and not len(cache)
    assert one.extend() and len(one.hashes) == SEGMENT_BLOCKS
    assert one.extend() and len(one.hashes) == 2 * SEGMENT_BLOCKS


def test_what_was_hashed_lately_is_found_at_once() -> None:
    prompt, cache = tokens(16 * 100), ChainCache()
    all_of(chain(prompt, cache))
    again = chain([*prompt[: 16 * 64], *tokens(500, 9)], cache)
    assert again.extend() and len(again.hashes) == SEGMENT_BLOCKS
    assert all_of(again) == hashes([*prompt[: 16 * 64], *tokens(500, 9)][:-1])


def test_tenants_share_no_segment() -> None:
    prompt, cache = tokens(16 * 40), ChainCache()
    mine, theirs = all_of(chain(prompt, cache, salt=b"acme")), all_of(chain(prompt, cache, salt=b"zoo"))
    assert not set(mine) & set(theirs)
    assert theirs == hashes(prompt[:-1], salt=b"zoo")


def test_the_cache_is_bounded_and_keeps_what_is_used() -> None:
    cache, popular = ChainCache(10), tokens(16 * 40)
    all_of(chain(popular, cache))
    for number in range(50):
        all_of(chain(tokens(16 * 40, 50 + number), cache))
        assert chain(popular, cache).extend()
    assert len(cache) == 10
    again = chain(popular, cache)
    assert again.extend() and len(again.hashes) == SEGMENT_BLOCKS


def test_a_prompt_makes_a_chain_for_each_layout_and_can_forget_them() -> None:
    prompt = Prompt(token_bytes.pack(tokens(200)), b"", ChainCache())
    one = prompt.chain("f", 16)
    assert prompt.chain("f", 16) is one and prompt.chain("f", 32) is not one and prompt.chain("g", 16) is not one
    prompt.forget()
    assert prompt.chain("f", 16) is not one
