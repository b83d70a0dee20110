"""What of a prediction an answer has repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from services.gateway.bodies import Usage
from services.gateway.choices import ChoiceRules, ChoiceText, StopStrings
from services.gateway.repeated import Repeated


class Characters:
    """Each id is a character."""

    def push(self, ids: Sequence[int], /) -> str:
        return "".join(map(chr, ids))

    def finish(self) -> str:
        return ""


def count(prediction: str, answer: str, cut: int = 1) -> int:
    found = Repeated([*map(ord, prediction)])
    for start in range(0, len(answer), cut):
        found.push([*map(ord, answer[start : start + cut])])
    return found.count


@pytest.mark.parametrize("cut", [1, 3, 100])
@pytest.mark.parametrize(
    ("prediction", "answer", "counted"),
    [
        ("abcd", "abcd", 4),
        ("abcd", "abcdefg", 4),
        ("abcd", "ab", 2),
        ("abcd", "aXXbcd", 4),  # something was added
        ("abcdef", "cdef", 4),  # and something left out
        ("abcdefg", "abxdeyg", 4),  # one token behind another one says too little
        ("abcd", "xyz", 0),
        ("", "abc", 0),
        ("abc", "", 0),
        ("aaaa", "aaaaaaaa", 4),
        ("abab", "abXab", 4),
    ],
)
def test_tokens_of_a_prediction_count_in_its_order(prediction: str, answer: str, counted: int, cut: int) -> None:
    assert count(prediction, answer, cut) == counted


def test_no_token_counts_twice_and_a_change_costs_its_neighbours_at_most() -> None:
    draws = random.Random(3)
    for _ in range(300):
        prediction = [draws.randrange(40) for _ in range(draws.randrange(1, 90))]
        answer = [token if draws.random() < 0.9 else 1000 + draws.randrange(9) for token in prediction]
        found = Repeated(prediction)
        found.push(answer)
        changed = sum(one != other for one, other in zip(prediction, answer, strict=True))
        assert len(prediction) - 3 * changed <= found.count <= len(prediction) - changed


def test_what_follows_a_stop_string_does_not_count() -> None:
    rules = ChoiceRules(stops=StopStrings(["c"]), prediction=[*map(ord, "abcdef")])
    choice = ChoiceText(Characters(), rules)
    choice.push([*map(ord, "abcdef")])
    assert choice.finish == "stop" and choice.repeated.count == choice.token_count == 3


def test_what_is_left_out_is_bounded() -> None:
    prediction = [*range(2000)]
    near, far = Repeated(prediction), Repeated(prediction)
    near.push([0, 1, *range(200, 260)])
    far.push([0, 1, *range(1500, 1560)])
    assert (near.count, far.count) == (62, 2)


def test_usage_tells_both_parts_of_a_prediction_and_nothing_without_one() -> None:
    used = Usage(prompt_tokens=5, completion_tokens=7, predicted_tokens=9, repeated_tokens=6)
    assert used.body()["completion_tokens_details"] == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 3}
    both = Usage(prompt_tokens=5, completion_tokens=7, reasoning_tokens=2, predicted_tokens=9).body()
    assert both["completion_tokens_details"] == {
        "reasoning_tokens": 2,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 9,
    }
    assert "completion_tokens_details" not in Usage(prompt_tokens=5, completion_tokens=7).body()
