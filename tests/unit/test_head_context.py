"""What a head notes of a sequence: states and tokens in order, whatever is computed twice, left out or never seen."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.cpu.head_context import KEPT_STATES, HeadContext, HeadContexts, States

BLOCK_TOKENS = 4


def context(num_blocks: int = 8) -> HeadContext:
    return HeadContext(np.arange(num_blocks), BLOCK_TOKENS)


def states(start: int, end: int) -> States:
    """The state of a position is its number."""
    return np.arange(start, end, dtype=np.float32)[:, None]


def tokens(start: int, end: int) -> list[int]:
    return [1000 + position for position in range(start, end)]


def test_a_prompt_in_parts_leaves_its_last_state_until_the_next_token_is_known() -> None:
    one = context()
    one.note(0, states(0, 3), tokens(0, 3))
    computed, nexts, place, position = one.take(0)
    assert (computed[:, 0].tolist(), nexts, place, position) == ([0, 1], tokens(1, 3), 0, 0)
    one.note(3, states(3, 5), tokens(3, 6))
    computed, nexts, place, position = one.take(2)
    assert (computed[:, 0].tolist(), nexts, place, position) == ([2, 3, 4], tokens(3, 6), 2, 2)


def test_the_oldest_blocks_give_way() -> None:
    one = context(num_blocks=4)
    for start in range(0, 60, 3):
        one.note(start, states(start, start + 3), tokens(start, start + 4))
        computed, nexts, place, position = one.take(2)
        assert position == start and len(computed) == len(nexts) == 3
        assert place + 3 + 2 <= one.capacity
        assert place == position - one.first
        assert sorted(one.blocks.tolist()) == [0, 1, 2, 3]


def test_a_long_prompt_leaves_its_end() -> None:
    one = context(num_blocks=4)
    one.note(0, states(0, 100), tokens(0, 101))
    computed, _, place, position = one.take(2)
    assert computed[-1, 0] == 99 and place == 0 and position == 100 - len(computed)
    assert len(computed) + 2 <= one.capacity


def test_for_whom_nothing_is_drafted_the_latest_states_are_kept() -> None:
    one = context(num_blocks=64)
    for start in range(0, 200, 2):
        one.note(start, states(start, start + 2), tokens(start, start + 3))
        one.keep_latest(KEPT_STATES)
    computed, nexts, place, position = one.take(4)
    assert (len(computed), place, position) == (KEPT_STATES, 0, 200 - KEPT_STATES)
    assert nexts[-1] == 1200


def test_who_was_here_last_is_remembered() -> None:
    contexts = HeadContexts(count=2, blocks_each=4, block_tokens=BLOCK_TOKENS)
    first, second = contexts.of(1), contexts.of(2)
    first.note(0, states(0, 2), tokens(0, 3))
    assert contexts.of(1) is first
    third = contexts.of(3)
    assert contexts.of(1) is first and third is not second
    assert sorted([*first.blocks, *third.blocks]) == list(range(8))
    assert contexts.of(2).num_known == 0


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_pairs_come_in_order_and_without_gaps(data: st.DataObject) -> None:
    """Steps go on, are computed again, or leave something out; each pair has the state of its position and the token behind."""
    one = context(num_blocks=6)
    at = 0
    for _ in range(data.draw(st.integers(1, 20))):
        start = max(0, at + data.draw(st.sampled_from([0, 0, 0, 0, -3, -50, 7])))
        count = data.draw(st.integers(1, 12))
        is_sampled = data.draw(st.booleans())
        one.note(start, states(start, start + count), tokens(start, start + count + is_sampled))
        at = start + count
        assert one.num_known == at
        if data.draw(st.booleans()):
            one.keep_latest(data.draw(st.integers(1, 30)))
        elif one.nexts:
            spare = data.draw(st.integers(0, 4))
            computed, nexts, place, position = one.take(spare)
            positions = [int(state) for state in computed[:, 0]]
            assert positions == list(range(position, position + len(nexts)))
            assert nexts == tokens(position + 1, position + 1 + len(nexts))
            assert place == position - one.first >= 0
            assert place + len(nexts) + spare <= one.capacity
            assert at - 1 <= one.end <= at
        assert one.num_known == at
