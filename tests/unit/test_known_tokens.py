"""A prompt whose beginning is known is taken as it would be without: a beginning that is another's changes nothing."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cache.prefix import hash_chain
from common.engine.known_tokens import KnownTokens
from common.engine.sequence import Sequence
from common.protocol import tokens as token_bytes
from common.protocol.errors import ProtocolError
from tests.unit.scheduling import MAX_CONTEXT, VOCAB, generation

SIZE = 4
PROMPT = list(range(10, 33))


def known(*parts: tuple[int, list[int]], salt: bytes = b"", fingerprint: str = "m") -> KnownTokens:
    made = KnownTokens(block_tokens=SIZE, fingerprint=fingerprint, salt=salt, vocab_size=VOCAB)
    for first_block, tokens in parts:
        made.extend(first_block, token_bytes.pack(tokens))
    return made


def taken(prompt: list[int], prefix: KnownTokens, salt: bytes = b"") -> Sequence:
    asked = msgspec.structs.replace(generation("r", prompt), salt=salt)
    return Sequence.of(asked, vocab_size=VOCAB, max_context=MAX_CONTEXT, prefix=prefix)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), st.data())
def test_a_known_beginning_gives_the_same_tokens_and_hashes(prompt: list[int], data: st.DataObject) -> None:
    ends = sorted(data.draw(st.sets(st.integers(0, len(prompt) // SIZE))))
    parts = [(begin, prompt[begin * SIZE : end * SIZE]) for begin, end in zip([0, *ends], ends, strict=False)]
    sequence = taken(prompt, known(*parts))
    assert sequence.tokens == prompt and sequence.num_outputs == 0 and sequence.held_from == len(prompt)
    chain = hash_chain(prompt, SIZE, fingerprint="m", salt=b"")
    assert sequence.hashes == chain[: ends[-1] if ends else 0]


@pytest.mark.parametrize("at", range(16))
def test_a_beginning_with_another_token_is_not_used(at: int) -> None:
    other = [*PROMPT[:at], 9, *PROMPT[at + 1 :]]
    sequence = taken(PROMPT, known((0, other[:16])))
    assert sequence.tokens == PROMPT and not sequence.hashes


def test_a_beginning_of_another_tenant_or_longer_than_the_prompt_is_not_used() -> None:
    assert not taken(PROMPT, known((0, PROMPT[:16]), salt=b"a"), salt=b"b").hashes
    assert not taken(PROMPT[:15], known((0, PROMPT[:16]))).hashes
    assert len(taken(PROMPT[:16], known((0, PROMPT[:16]))).hashes) == 4


def test_parts_that_do_not_follow_are_left_out() -> None:
    lost = known((0, PROMPT[:8]), (3, PROMPT[12:16]))
    assert lost.tokens == PROMPT[:8] and len(lost.hashes) == 2
    twice = known((0, PROMPT[:8]), (0, PROMPT[:8]), (2, PROMPT[8:12]))
    assert twice.tokens == PROMPT[:12]
    partial = known((0, PROMPT[:7]))
    assert not partial.tokens and not partial.hashes


def test_tokens_that_are_not_of_the_vocabulary_are_refused_with_the_prompt() -> None:
    prefix = known((0, [VOCAB, 1, 2, 3]))
    assert not prefix.tokens
    with pytest.raises(ProtocolError):
        taken([VOCAB, 1, 2, 3, 4], prefix)
