"""Lookup proposes what came before, knows how likely that is to hold, and lets no salt see what another one wrote."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from common.engine.outcomes import Outcome, accept
from common.engine.sequence import Sequence
from common.protocol import tokens as token_bytes
from common.protocol.errors import ProtocolError
from services.decode.hit_rates import HitRates, Record
from services.decode.lookup import TIDY_TOKENS, Lookup
from services.decode.recent_texts import RecentTexts
from tests.unit.scheduling import VOCAB, generation

WORDS = [*range(10, 40)]


def sequence(prompt: list[int], request: str = "a", *, salt: bytes = b"", **sampling: Any) -> Sequence:
    asked = msgspec.structs.replace(generation(request, prompt, **sampling), salt=salt)
    return Sequence.of(asked, vocab_size=VOCAB, max_context=1 << 20)


def lookup(*, max_tokens: int = 4096, max_recent_tokens: int = 4096) -> Lookup:
    return Lookup(max_tokens=max_tokens, max_recent_tokens=max_recent_tokens)


def opened(drafter: Lookup, s: Sequence) -> Sequence:
    drafter.open(s)
    drafter.tidy()
    return s


def answer(drafter: Lookup, prompt: list[int], output: list[int], **options: Any) -> None:
    """A request that ends with this output."""
    s = opened(drafter, sequence(prompt, "earlier", **options))
    s.tokens += output
    s.finish = "stop"
    drafter.close(s)


def test_what_followed_the_same_words_in_the_request_is_proposed() -> None:
    drafter = lookup()
    s = opened(drafter, sequence([*WORDS, 1, 10, 11]))
    guess = drafter.guess(s, 4)
    assert guess.tokens == [12, 13, 14, 15]
    assert guess.chances == sorted(guess.chances, reverse=True) and 0 < guess.chances[-1] < guess.chances[0] < 1
    s.tokens += [12, 13, 14]
    longer = drafter.guess(s, 4)
    assert longer.tokens == [15, 16, 17, 18] and longer.chances[0] > guess.chances[0], "a longer match is surer"
    s.tokens += [99]
    assert drafter.guess(s, 4) == ([], [])
    assert drafter.guess(sequence(WORDS, "unknown"), 4) == ([], [])


def predicting(prompt: list[int], prediction: list[int], request: str = "a") -> Sequence:
    asked = msgspec.structs.replace(generation(request, prompt), prediction=token_bytes.pack(prediction))
    return Sequence.of(asked, vocab_size=VOCAB, max_context=1 << 20)


def test_what_the_client_predicts_is_proposed_to_this_request_alone() -> None:
    drafter = lookup()
    s = opened(drafter, predicting([1, 2, 3], [2, 3, *WORDS]))
    assert drafter.guess(s, 4).tokens == [10, 11, 12, 13], "the prediction begins with the prompt's end"
    s.tokens += [10, 11, 99, 98]
    assert drafter.guess(s, 4).tokens == []
    s.tokens += [30, 31]
    assert drafter.guess(s, 4).tokens == [32, 33, 34, 35], "behind what differs it is found again"
    s.tokens += [32, 33, 34, 35, 36, 37]
    assert drafter.guess(s, 4).tokens == [38, 39], "nothing is copied across its end"
    s.tokens += [38, 39]
    assert drafter.guess(s, 4).tokens == []
    assert drafter.guess(opened(drafter, sequence([5, 10, 11], "b")), 4).tokens == []


def test_behind_a_verification_a_prediction_is_foreseen() -> None:
    drafter = lookup()
    s = opened(drafter, predicting([1, 2, 3], [2, 3, *WORDS]))
    s.verifying = drafter.guess(s, 3).tokens
    assert Outcome(3, 13, [14, 15, 16]) in drafter.foresee(s, 3).outcomes


def test_a_long_prediction_is_indexed_in_parts_while_steps_run() -> None:
    drafter = lookup(max_tokens=1 << 20)
    long = random.Random(1).choices(range(3, VOCAB), k=2 * TIDY_TOKENS)
    s = predicting([1, 2, long[5], long[6]], long)
    drafter.open(s)
    assert drafter.guess(s, 3).tokens == [], "not yet: it would hold up the step"
    for _ in range(3):
        drafter.tidy()
    assert drafter.guess(s, 3).tokens == long[7:10]
    short = lookup(max_tokens=64)
    assert short.guess(opened(short, predicting([1, 2, long[5], long[6]], long)), 3).tokens == [], "what does not fit is left"


def test_a_prediction_with_tokens_that_there_are_not_is_refused() -> None:
    with pytest.raises(ProtocolError, match="token ids"):
        predicting([1, 2, 3], [VOCAB])
    with pytest.raises(ProtocolError, match="whole number"):
        Sequence.of(msgspec.structs.replace(generation("a", [1]), prediction=b"abc"), vocab_size=VOCAB, max_context=1 << 20)


def test_the_continuation_that_came_most_often_is_proposed() -> None:
    drafter = lookup()
    s = opened(drafter, sequence([1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]))
    assert drafter.guess(s, 1).tokens == [7]


def test_a_recent_answer_is_proposed_to_the_same_salt_only() -> None:
    drafter = lookup()
    answer(drafter, [1, 2, 3], WORDS, salt=b"acme")
    for salt, expected in ((b"acme", [12, 13, 14]), (b"zoo", []), (b"", [])):
        s = opened(drafter, sequence([5, 10, 11], salt=salt))
        assert drafter.guess(s, 3).tokens == expected


@pytest.mark.parametrize("max_recent_tokens", [0, 4096])
def test_nothing_of_a_request_is_kept_where_nothing_may_be(max_recent_tokens: int) -> None:
    drafter = lookup(max_recent_tokens=max_recent_tokens)
    answer(drafter, [1, 2, 3], WORDS)
    s = opened(drafter, sequence([5, 10, 11]))
    assert bool(drafter.guess(s, 3).tokens) == bool(max_recent_tokens)
    drafter.close(s)
    assert len(drafter) == 0
    assert drafter.recent is None or len(drafter.recent) == len(WORDS) + 1, "cancelled answers and prompts are not"


def test_recent_texts_are_bounded_and_the_salt_used_last_stays() -> None:
    recent = RecentTexts(max_tokens=400)
    for number in range(300):
        recent.add(b"%d" % (number % 20), [number % VOCAB] * (1 + number % 37))
        recent.add(b"mine", WORDS)
        assert len(recent) <= 400
    mine = recent.of(b"mine")
    assert mine is not None and mine.find([10, 11]) is not None
    assert recent.of(b"nobody's") is None


def test_a_long_prompt_is_indexed_in_parts_while_steps_run() -> None:
    drafter = lookup(max_tokens=1 << 20)
    long = [random.Random(1).randrange(3, VOCAB) for _ in range(2 * TIDY_TOKENS)]
    s = sequence([*long, long[5], long[6]])
    drafter.open(s)
    assert drafter.guess(s, 3).tokens == [], "not yet: it would hold up the step"
    for _ in range(3):
        drafter.tidy()
    assert drafter.guess(s, 3).tokens != []


def test_a_sequence_keeps_no_more_than_its_share() -> None:
    drafter = lookup(max_tokens=64)
    s = opened(drafter, sequence([*WORDS, *[random.Random(1).randrange(100, VOCAB) for _ in range(500)], 10, 11]))
    assert drafter.guess(s, 3).tokens == [], "too long ago"
    s.tokens += [500, 501, 502, 500, 501]
    assert drafter.guess(s, 1).tokens == [502]


def test_both_ends_of_a_verification_are_foreseen() -> None:
    drafter = lookup()
    s = opened(drafter, sequence([1, 2, 7, 30, 31, 1, 2, 8, 40, 41, 1, 2, 8, 40, 42, 1, 2]))
    proposal = drafter.guess(s, 2).tokens
    assert proposal == [8, 40]
    s.verifying = proposal
    foreseen = drafter.foresee(s, 2)
    assert Outcome(2, 42, [1, 2]) in foreseen.outcomes, "it holds, and goes on as it did last"
    assert Outcome(2, 41, [1, 2]) in foreseen.outcomes, "or as it did before"
    assert Outcome(0, 7, [30, 31]) in foreseen.outcomes, "or it does not hold"
    assert all(0 < chance <= 1 for chance in foreseen.chances) and len(foreseen.chances) == 2
    s.verifying = []
    assert drafter.foresee(s, 2).outcomes[0] == Outcome(0, 8, [40, 42]), "behind a step that verifies nothing"


def test_what_is_foreseen_is_what_would_be_guessed_then() -> None:
    dice = random.Random(3)
    for _ in range(300):
        tokens = [dice.randrange(3, 8) for _ in range(60)]
        drafter = lookup()
        s = opened(drafter, sequence(tokens))
        s.verifying = drafter.guess(s, dice.randrange(1, 4)).tokens
        for accepted, token, _ in drafter.foresee(s, 3).outcomes:
            assert accepted in (0, len(s.verifying))
            assert accepted == len(s.verifying) or token != s.verifying[0]
        whole = [one for one in drafter.foresee(s, 3).outcomes if one.accepted == len(s.verifying)]
        later = opened(fresh := lookup(), sequence([*tokens, *s.verifying]))
        expected = fresh.guess(later, 4).tokens
        assert [*whole[:1]] == ([Outcome(len(s.verifying), expected[0], expected[1:])] if expected else [])


def test_chances_become_what_is_measured() -> None:
    """Matches of which a third hold, in a text that repeats its words in random order, are soon known to."""
    dice = random.Random(5)
    drafter = lookup(max_tokens=1 << 16)
    s = opened(drafter, sequence([1, 2]))
    promised, held = 0.0, 0
    for step in range(3000):
        guess = drafter.guess(s, 3)
        last = s.tokens[-1]
        s.tokens.append(last + 1 if last % 2 else dice.choice([3, 5, 7]))  # pairs of words; each pair is one of three
        drafter.record(s)
        if guess.tokens and step > 500:
            promised += guess.chances[0]
            held += accept(guess.tokens[:1], s.tokens[-1:])
    assert held == pytest.approx(promised, rel=0.1)


def test_a_sequence_corrects_the_table_for_itself() -> None:
    rates, good, bad = HitRates(), Record(), Record()
    bucket = rates.bucket(2, 1, 1, shared=False)
    for _ in range(20):
        rates.record(bucket, True, good)
        rates.record(bucket, False, bad)
    assert rates.chance(bucket, bad) < rates.chance(bucket, Record()) < rates.chance(bucket, good) < 1
    assert rates.bucket(2, 1, 1, shared=True) != bucket != rates.bucket(3, 1, 1, shared=False)
    assert len({rates.bucket(9, votes, 4, shared=False) for votes in (2, 4)} | {rates.bucket(9, 1, 1, shared=False)}) == 3


def test_guesses_that_were_never_compared_do_not_pile_up() -> None:
    drafter = lookup()
    s = opened(drafter, sequence([1, 2, 3, 1, 2]))
    for _ in range(100):
        drafter.guess(s, 2)
    assert len(drafter._texts["a"].pending) < 10
