"""Tokens to text: stop strings cut exactly and are never shown in part, however the tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.protocol.messages import TokenLogprobs
from services.gateway.choices import ChoiceRules, ChoiceText, StopStrings, choice_seed


class Letters:
    """A detokenizer whose token ids are code points, or entries of `pieces` counted from 0x110000."""

    def __init__(self, pieces: Sequence[str] = (), held: str = "") -> None:
        self.pieces = pieces
        self.held = held

    def push(self, ids: Sequence[int]) -> str:
        return "".join(chr(id) if id < 0x110000 else self.pieces[id - 0x110000] for id in ids)

    def finish(self) -> str:
        return self.held


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def choice(stops: Sequence[str] = (), source: Letters | None = None, **options: object) -> ChoiceText:
    rules = ChoiceRules(stops=StopStrings(stops) if stops else None, **options)  # type: ignore[arg-type]
    return ChoiceText(source or Letters(), rules)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the match that ends first, the longest of those: by trying everything."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


def test_without_stop_strings_text_flows_at_once() -> None:
    text = choice()
    assert text.push(ids("hello")).text == "hello"
    assert text.push(ids("!"), finish="length").text == "!"
    assert (text.finish, text.token_count) == ("length", 6)


def test_a_stop_string_cuts_at_its_start_and_across_pushes() -> None:
    text = choice(["STOP"])
    assert text.push(ids("abcS")).text == "abc"
    assert text.push(ids("TO")).text == ""
    last = text.push(ids("Pxyz"))
    assert (last.text, last.finish) == ("", "stop")
    assert text.token_count == 7, "tokens behind the match do not count"


def test_a_prefix_that_comes_to_nothing_is_given_back() -> None:
    text = choice(["STOP"])
    assert text.push(ids("STO")).text == ""
    assert text.push(ids("RE")).text == "STORE"


def test_what_is_held_is_sent_when_the_choice_ends_otherwise() -> None:
    text = choice(["STOP"])
    text.push(ids("aST"))
    assert text.push([], finish="length").text == "ST"


def test_a_stop_string_inside_one_token() -> None:
    text = choice(["\n\n"], Letters(["a\n\nb"]))
    last = text.push([0x110000])
    assert (last.text, last.finish) == ("a", "stop")


def test_text_the_detokenizer_held_can_complete_a_stop_string() -> None:
    text = choice(["ab"], Letters(held="b"))
    assert text.push(ids("xa")).text == "x"
    last = text.push([], finish="length")
    assert (last.text, last.finish) == ("", "stop")


def test_the_stop_string_is_shown_when_asked_for() -> None:
    assert choice(["ST"], include_stop=True).push(ids("abSTc")).text == "abST"


def test_stop_strings_wait_for_min_tokens() -> None:
    text = choice(["a"], min_tokens=3)
    first = text.push(ids("aaa"))
    assert (first.text, first.finish) == ("aaa", None)
    last = text.push(ids("ba"))
    assert (last.text, last.finish, text.token_count) == ("b", "stop", 5)


def test_a_stop_token_counts_but_is_not_shown() -> None:
    text = choice(stop_token_ids={ord("$")})
    last = text.push(ids("hi$"), finish="stop")
    assert (last.text, last.finish, text.token_count) == ("hi", "stop", 3)


def test_a_stop_token_that_did_not_end_the_choice_is_shown() -> None:
    text = choice(stop_token_ids={ord("$")}, min_tokens=5)
    assert text.push(ids("$")).text == "$"
    assert text.push(ids("$"), finish="length").text == "$"


def test_nothing_follows_the_end() -> None:
    text = choice(["x"])
    text.push(ids("ax"))
    again = text.push(ids("more"), finish="length")
    assert (again.text, again.finish, text.token_count) == ("", "stop", 2)


ALPHABET = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(text=ALPHABET, stops=STOPS, cuts=st.lists(st.integers(1, 6), max_size=40), include=st.booleans())
def test_the_cut_is_where_the_first_match_is_however_tokens_arrive(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    subject = choice(stops, include_stop=include)
    shown, rest = "", text
    for size in cuts:
        piece, rest = rest[:size], rest[size:]
        delta = subject.push(ids(piece))
        shown += delta.text
        if delta.finish:
            break
        seen = text[: len(text) - len(rest)]
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops), "held without a reason"
        assert not any(stop.startswith(seen[i:]) for i in range(len(shown)) for stop in stops), "part of a stop string shown"
    else:
        shown += subject.push(ids(rest), finish="length").text
    match = first_stop(text, stops)
    assert shown == (text if match is None else text[: match[1] if include else match[0]])
    assert subject.finish == ("length" if match is None else "stop")


def scores(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-0.5 * index) for index in range(count)]


def test_every_shown_token_is_scored_once_with_its_offset() -> None:
    text = choice(scored=True)
    first = text.push(ids("ab"), scores(2))
    second = text.push(ids("c"), scores(1), "length")
    assert [(t.token, t.offset) for t in [*(first.scored or []), *(second.scored or [])]] == [(97, 0), (98, 1), (99, 2)]


def test_scores_wait_for_their_text_and_go_with_the_cut() -> None:
    text = choice(["STOP"], scored=True)
    first = text.push(ids("aST"), scores(3))
    assert [t.token for t in first.scored or []] == ids("a")
    assert text.push(ids("OPb"), scores(3)).scored == []


def test_scores_of_held_text_come_with_the_end() -> None:
    text = choice(["STOP"], scored=True, stop_token_ids={0})
    text.push(ids("aST"), scores(3))
    last = text.push([0], scores(1), "stop")
    assert [t.token for t in last.scored or []] == ids("ST")


def test_without_scores_asked_for_none_are_given() -> None:
    assert choice().push(ids("a"), scores(1)).scored is None


def test_choice_seeds_differ_repeat_and_begin_with_the_requests_own() -> None:
    seeds = [choice_seed(42, index) for index in range(128)]
    assert seeds == [choice_seed(42, index) for index in range(128)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 128
    assert all(0 <= choice_seed(seed, 5) < 2**63 for seed in (0, 1, 2**63 - 1))


@pytest.mark.parametrize("stops", [["a" * 256] * 16, [chr(97 + i) * 256 for i in range(16)], ["a" * i for i in range(1, 17)]])
def test_the_largest_stop_lists_cost_little(stops: list[str]) -> None:
    subject = choice(stops, min_tokens=0)
    for _ in range(2000):
        subject.push(ids("bza"))
