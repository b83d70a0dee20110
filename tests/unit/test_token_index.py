"""Lookup in a text finds what a search of the whole text finds, however it was added, and keeps no more than it may."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode.token_index import MAX_MATCH, MIN_MATCH, SEPARATOR, Match, TokenIndex

EVERYTHING = 1 << 30
TEXTS = st.lists(st.integers(0, 3), max_size=120)


def index_of(tokens: list[int], *, max_tokens: int = EVERYTHING, max_candidates: int = EVERYTHING) -> TokenIndex:
    index = TokenIndex(max_tokens=max_tokens, max_candidates=max_candidates)
    index.extend(tokens)
    return index


def ends_of_longest_match(text: list[int], context: list[int]) -> tuple[list[int], int]:
    """All positions in `text` that end the longest match of the end of `context`, with a token behind them; by brute force."""
    for length in range(min(MAX_MATCH, len(context)), MIN_MATCH - 1, -1):
        suffix = context[-length:]
        ends = [
            end
            for end in range(length - 1, len(text) - 1)
            if text[end - length + 1 : end + 1] == suffix and text[end + 1] != SEPARATOR
        ]
        if ends:
            return ends, length
    return [], 0


def check(found: Match | None, text: list[int], context: list[int]) -> None:
    ends, length = ends_of_longest_match(text, context)
    if not ends:
        assert found is None
        return
    votes = Counter(text[end + 1] for end in ends)
    assert found is not None
    assert (found.length, found.num_found) == (length, len(ends))
    token = text[found.position + 1]
    assert found.num_agreeing == votes[token] == max(votes.values()), "the most frequent continuation"
    assert found.position == max(end for end in ends if text[end + 1] == token), "and of that the latest"
    others = [end for end in ends if text[end + 1] != token]
    assert found.other == max(others, default=-1)


@given(text=TEXTS)
@settings(deadline=None)
def test_the_longest_match_of_a_text_with_itself_is_found(text: list[int]) -> None:
    check(index_of(text).find(text), text, text)


@given(text=st.lists(st.sampled_from([0, 1, 2, SEPARATOR]), max_size=120), context=TEXTS)
@settings(deadline=None)
def test_the_longest_match_in_other_texts_is_found_and_never_across_their_borders(text: list[int], context: list[int]) -> None:
    index = index_of(text)
    found = index.find(context)
    check(found, text, context)
    if found is not None:
        copied = index.follow(found.position, 50)
        assert SEPARATOR not in copied
        assert copied == text[found.position + 1 :][: len(copied)]


@given(parts=st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=20), hints=st.integers(-2, 100))
@settings(deadline=None)
def test_a_text_added_in_parts_is_found_as_if_added_whole(parts: list[list[int]], hints: int) -> None:
    text, grown = [], TokenIndex(max_tokens=EVERYTHING, max_candidates=EVERYTHING)
    for part in parts:
        text += part
        grown.extend(part)
        whole = index_of(text)
        assert grown.find(text) == whole.find(text)
        hinted = grown.find(text, hints)
        expected = whole.find(text)
        assert (hinted and (hinted.length, hinted.num_found)) == (expected and (expected.length, expected.num_found))


def test_a_hint_leads_to_a_match_that_is_too_far_back_for_the_links() -> None:
    phrase = [*range(10, 20), 1, 2]
    text = [*phrase, 77, *[9, 1, 2] * 40, *phrase]
    index = index_of(text, max_candidates=16)
    without, hinted = index.find(text), index.find(text, hint=len(phrase) - 1)
    assert without is not None and without.length == 2
    assert hinted is not None and (hinted.position, hinted.length) == (len(phrase) - 1, len(phrase))


@given(text=st.lists(st.integers(0, 5), max_size=400), max_tokens=st.integers(4, 60), step=st.integers(1, 70))
@settings(deadline=None)
def test_no_more_is_kept_than_may_be_and_positions_stay_those_of_the_whole_text(
    text: list[int], max_tokens: int, step: int
) -> None:
    index = TokenIndex(max_tokens=max_tokens, max_candidates=EVERYTHING)
    for start in range(0, len(text), step):
        index.extend(text[start : start + step])
        assert index.num_kept <= max_tokens and len(index) == min(len(text), start + step)
    kept = text[len(text) - index.num_kept :]
    ends, length = ends_of_longest_match(kept, text)
    found = index.find(text)
    assert (found is None) == (not ends)
    if found is not None:
        assert found.length == length
        assert text[found.position + 1 - length : found.position + 1] == text[len(text) - length :]
        assert index.follow(found.position, 3, tail=[])[0] == text[found.position + 1]


def test_a_copy_that_reaches_the_end_of_its_own_text_goes_on_with_itself() -> None:
    index = index_of([5, 1, 2, 3, 1, 2])
    assert index.follow(2, 7, tail=[]) == [3, 1, 2, 3, 1, 2, 3]
    assert index.follow(2, 7, tail=[3, 8]) == [3, 1, 2, 3, 8, 3, 1]
    assert index.follow(2, 7) == [3, 1, 2], "another text has ended"


def test_a_search_takes_a_bounded_time_in_a_text_that_repeats_itself() -> None:
    """A bounded number of tokens is read, by count, not by clock."""

    class Counting(list[int]):
        reads = 0

        def __getitem__(self, index: object) -> int:  # type: ignore[override]
            Counting.reads += 1
            return super().__getitem__(index)  # type: ignore[index, return-value]

    text = [random.Random(1).randrange(2) for _ in range(50_000)]
    index = index_of(text, max_candidates=16)
    index.find(Counting(text[-MAX_MATCH:]))
    assert Counting.reads <= 16 * (MAX_MATCH + 1) + 4
