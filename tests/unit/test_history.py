"""A view of a sequence's tokens, with another text before them, is the list that it stands for."""

from __future__ import annotations

import pytest

from common.engine.history import History
from common.engine.plan import UNKNOWN
from common.protocol import tokens as token_bytes


@pytest.mark.parametrize("before", [[], [11, 12, 13, 14]])
@pytest.mark.parametrize("tail", [[], [9, UNKNOWN]])
def test_any_part_is_that_of_the_list(before: list[int], tail: list[int]) -> None:
    history = History(1, [5, 6, 7, 8], 3, tail, token_bytes.pack(before))
    whole = [*before, 5, 6, 7, *tail]
    assert len(history) == len(whole)
    for start in range(-1, len(whole) + 2):
        for end in range(-1, len(whole) + 2):
            assert history[start:end] == whole[start:end]
    assert [history[place] for place in range(len(whole))] == whole
