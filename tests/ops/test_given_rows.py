"""A step's inputs with other rows: what the kernel writes is what the reference writes, and what a host would have packed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from common.ops import backend
from common.ops.sampling.given_row_layout import (
    ENDS,
    GIVEN,
    GOES_ON,
    MAX_CHANGES,
    PLACE_SHIFT,
    GivenRows,
    given_words,
)
from common.ops.sampling.given_rows import advance_with_given
from common.ops.sampling.open_row_inputs import StepInputs
from tests.ops.test_open_rows import BLOCK_TOKENS, inputs

GROUPS, TABLE = 2, 16
READ = ("tokens", "feeds", "positions", "query_starts", "context_lens", "slots", "block_starts", "block_ids")


@dataclass
class Row:
    """place: of its tables among those that there are. token: -1 where it is fed."""

    place: int
    start: int
    token: int = 1
    feed: int = -1


def blank(capacity: int, num_tables: int, seed: int) -> StepInputs:
    """A step of nothing but padding, over block tables of random ids."""
    rng = random.Random(seed)
    ids = [rng.randrange(1000) for _ in range(GROUPS * num_tables * TABLE)]
    found = inputs(capacity, 1, [0], rng)._replace(
        query_starts=torch.zeros(capacity + 1, dtype=torch.int32),
        context_lens=torch.zeros(capacity, dtype=torch.int32),
        block_ids=torch.tensor(ids, dtype=torch.int32),
        block_starts=torch.zeros(GROUPS, capacity, dtype=torch.int32),
    )
    for field, nothing in ((found.tokens, 0), (found.feeds, -1), (found.positions, 0), (found.draws, 0), (found.slots, -1)):
        field[:] = nothing
    return found


def pack(step: StepInputs, rows: list[Row]) -> None:
    """Write what a host packs for `rows` into a blank step."""
    for index, row in enumerate(rows):
        step.tokens[index], step.feeds[index] = max(row.token, 0), row.feed
        step.positions[index], step.context_lens[index], step.draws[index] = row.start, row.start + 1, row.start + 1
        for group in range(GROUPS):
            begin = step.block_starts[group, index] = (GROUPS * row.place + group) * TABLE
            block = int(step.block_ids[int(begin) + row.start // BLOCK_TOKENS])
            step.slots[group, index] = block * BLOCK_TOKENS + row.start % BLOCK_TOKENS
    step.query_starts[1:] = torch.arange(1, len(step.context_lens) + 1).clamp(max=len(rows))


def say(rows: list[Row], given: list[int], changes: list[tuple[int, int]]) -> GivenRows[torch.Tensor]:
    """What is not written is nonsense: nobody may read it."""
    words = torch.full((given_words(GROUPS),), -77)
    host = GivenRows(words.numpy(), GROUPS)
    host.head[:] = len(rows), len(changes)
    host.kinds[: len(rows)], host.kinds[len(rows) :] = GOES_ON, ENDS
    for index in given:
        row = rows[index]
        host.kinds[index], host.tokens[index], host.feeds[index] = GIVEN, max(row.token, 0), row.feed
        host.positions[index] = row.start
        host.starts[:, index] = [(GROUPS * row.place + group) * TABLE for group in range(GROUPS)]
    for index, (place, block) in enumerate(changes):
        host.changes[index] = (place << PLACE_SHIFT) + block
    return GivenRows(words, GROUPS)


@pytest.mark.parametrize("on_kernel", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_rows_begin_end_and_move_beside_those_that_go_on(seed: int, on_kernel: bool) -> None:
    rng = random.Random(seed)
    capacity, num_tables = rng.choice([1, 8, 12, 64]), 80
    num_before = rng.randrange(1, capacity + 1)
    num_after = rng.randrange(1, capacity + 1)
    before = [Row(place, rng.randrange(TABLE * BLOCK_TOKENS - 1), rng.randrange(90)) for place in range(num_before)]
    after: list[Row] = []
    given: list[int] = []
    for index in range(num_after):
        way = rng.choice(["on", "on", "moves", "new"])
        if way == "on" and index < num_before:
            after.append(Row(before[index].place, before[index].start + 1, before[index].token, index))
            continue
        given.append(index)
        source = rng.randrange(num_before)
        if way == "moves":  # from another row of the step before
            after.append(Row(before[source].place, before[source].start + 1, -1, source))
        else:
            after.append(Row(70 + index % 9, rng.randrange(TABLE * BLOCK_TOKENS), rng.randrange(90)))
    places = rng.sample(range(GROUPS * num_tables * TABLE), rng.choice([0, 1, MAX_CHANGES]))
    changes = [(place, rng.randrange(1000)) for place in places]

    step, expected = blank(capacity, num_tables, seed), blank(capacity, num_tables, seed)
    pack(step, before)
    for place, block in changes:
        expected.block_ids[place] = block
    pack(expected, after)
    if on_kernel:
        with backend.interpreted():
            advance_with_given(step, say(after, given, changes))
    else:
        advance_with_given(step, say(after, given, changes))
    for name in READ:
        assert torch.equal(getattr(step, name), getattr(expected, name)), name
    assert torch.equal(step.draws[:num_after], expected.draws[:num_after])
