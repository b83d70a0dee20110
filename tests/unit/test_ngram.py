"""n-gram drafting: the guess a search of the whole sequence would make, at a cost that doesn't grow with its length."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.protocol.errors import ProtocolError
from common.protocol.handles import WorkerRef
from services.draft.ngram import NgramIndex, NgramProposer

DECODE = WorkerRef("decode", "decode-1", 1)
OTHER = WorkerRef("decode", "decode-1", 2)


def make_index(tokens: list[int], *, max_tokens: int = 1000, min_match: int = 2, max_candidates: int = 10_000) -> NgramIndex:
    index = NgramIndex(min_match=min_match, max_match=4, max_tokens=max_tokens, max_candidates=max_candidates)
    index.extend(tokens)
    return index


def searched(tokens: list[int], num_tokens: int, min_match: int, max_match: int) -> list[int]:
    """What the index must guess, found by looking everywhere."""
    for match in range(min(max_match, len(tokens) - 1), min_match - 1, -1):
        for start in range(len(tokens) - match - 1, -1, -1):
            if tokens[start : start + match] == tokens[-match:]:
                text = list(tokens)
                for _ in range(num_tokens):
                    text.append(text[start + match + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


def test_what_followed_the_last_occurrence_is_proposed() -> None:
    assert make_index([1, 2, 3, 4, 9, 1, 2]).propose(3) == [3, 4, 9]


def test_the_longer_match_wins_over_the_later_one() -> None:
    assert make_index([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2]).propose(1) == [7]


def test_the_later_of_equal_matches_wins() -> None:
    assert make_index([1, 2, 7, 1, 2, 8, 1, 2]).propose(1) == [8]


def test_a_loop_is_proposed_to_go_on() -> None:
    assert make_index([9, 1, 2, 1, 2]).propose(5) == [1, 2, 1, 2, 1]
    assert make_index([4, 4, 4]).propose(4) == [4, 4, 4, 4]


def test_nothing_is_proposed_for_new_text() -> None:
    assert make_index([1, 2, 3, 4]).propose(4) == []
    assert make_index([1]).propose(4) == make_index([]).propose(4) == []
    assert make_index([1, 2, 3, 9, 2, 3], min_match=3).propose(2) == []


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    min_match=st.integers(2, 3),
)
@settings(max_examples=300, deadline=None)
def test_the_index_finds_what_a_full_search_finds(tokens: list[int], cuts: list[int], min_match: int) -> None:
    """Fed in pieces, and rolled back in between."""
    index = make_index([], min_match=min_match)
    for cut in cuts:
        cut = min(cut, len(tokens))
        if cut < len(index):
            assert index.truncate(cut)
        index.extend(tokens[len(index) : cut])
        assert index.propose(5) == searched(tokens[:cut], 5, min_match, 4)
    index.extend(tokens[len(index) :])
    assert len(index) == len(tokens)
    assert index.propose(5) == searched(tokens, 5, min_match, 4)


@given(chunks=st.lists(st.integers(1, 40), max_size=20), max_tokens=st.integers(2, 30))
@settings(max_examples=100, deadline=None)
def test_memory_is_bounded_and_the_end_of_the_sequence_is_kept(chunks: list[int], max_tokens: int) -> None:
    rng = random.Random(7)
    index = make_index([], max_tokens=max_tokens)
    tokens: list[int] = []
    for size in chunks:
        fresh = [rng.randrange(3) for _ in range(size)]
        tokens += fresh
        index.extend(fresh)
        assert len(index) == len(tokens)
        kept = index._tokens.tolist()
        assert 0 < len(kept) <= max_tokens and kept == tokens[-len(kept) :]
        assert len(index._previous) == len(kept) and len(index._latest) <= len(kept)
        assert index.propose(3) == searched(kept, 3, 2, 4)


def test_rolling_back_behind_what_is_kept_is_a_gap() -> None:
    index = make_index(list(range(100)), max_tokens=10)
    assert index.truncate(97)
    assert not index.truncate(20)
    assert not index.truncate(98)


def test_what_is_no_token_id_is_refused() -> None:
    index = make_index([1, 2])
    for bad in (-1, 2**32):
        with pytest.raises(ProtocolError):
            index.extend([3, bad])
    assert len(index) == 2


def test_an_update_costs_the_new_tokens_not_the_length() -> None:
    rng = random.Random(1)
    costs: dict[int, float] = {}
    for length in (2_000, 200_000):
        index = NgramIndex(min_match=2, max_match=8, max_tokens=1_000_000)
        index.extend([rng.randrange(50) for _ in range(length)])
        turns: list[float] = []
        for _ in range(5):
            began = time.thread_time()
            for _ in range(400):
                index.extend([rng.randrange(50)])
                index.propose(8)
            turns.append(time.thread_time() - began)
        costs[length] = min(turns)
    assert costs[200_000] < 4 * costs[2_000] + 0.004


def make_proposer(*, max_sequences: int = 8) -> NgramProposer:
    return NgramProposer(max_sequences=max_sequences, max_tokens=100, min_match=2, max_match=4)


def test_updates_extend_a_mirror_and_a_gap_ends_it() -> None:
    proposer = make_proposer()
    key = (DECODE, "a")
    assert proposer.update(key, 0, [1, 2, 3, 1])
    assert proposer.update(key, 4, [2])
    assert proposer.propose([key], 2) == [[3, 1]]
    assert proposer.length(key) == 5
    assert not proposer.update(key, 6, [9])
    assert len(proposer) == 0 and proposer.propose([key], 2) == [[]]
    assert not proposer.update(key, 5, [9])


def test_a_resent_tail_replaces_what_was_there() -> None:
    proposer = make_proposer()
    key = (DECODE, "a")
    proposer.update(key, 0, [1, 2, 3, 1, 9])
    assert proposer.update(key, 4, [2])
    assert proposer.propose([key], 1) == [[3]]


def test_the_least_recently_updated_mirror_makes_room() -> None:
    proposer = make_proposer(max_sequences=2)
    proposer.update((DECODE, "a"), 0, [1])
    proposer.update((DECODE, "b"), 0, [1])
    proposer.update((DECODE, "a"), 1, [2])
    proposer.update((DECODE, "c"), 0, [1])
    assert [proposer.length((DECODE, name)) for name in "abc"] == [2, 0, 1]
    assert not proposer.update((DECODE, "b"), 1, [2])


def test_each_life_of_a_decode_worker_has_its_own_mirrors() -> None:
    proposer = make_proposer()
    proposer.update((DECODE, "a"), 0, [1])
    proposer.update((OTHER, "a"), 0, [1, 2])
    assert proposer.close_worker(DECODE) == 1
    assert proposer.length((OTHER, "a")) == 2
    proposer.close((OTHER, "a"))
    proposer.close((OTHER, "a"))
    assert len(proposer) == 0


def test_a_refused_update_leaves_no_mirror() -> None:
    proposer = make_proposer()
    with pytest.raises(ProtocolError):
        proposer.update((DECODE, "a"), 0, [1, -1])
    assert len(proposer) == 0
