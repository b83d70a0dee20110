"""Rows behind a step whose outcome only the device has: kernel and reference write what a host that knew it would."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.engine.board import ProposalBoard
from common.ops import backend
from common.ops.sampling.board_layout import BOARD_WORDS, LINE_TOKENS, LINES, TAKEN_WORDS
from common.ops.sampling.open_row_inputs import MAX_VERIFIED, StepInputs
from common.ops.sampling.open_rows import OpenRow, pack_open_rows, settle_open_rows

BLOCK_TOKENS = 4


def inputs(num_tokens: int, num_rows: int, sampled: list[int], rng: random.Random) -> StepInputs:
    num_groups, blocks = 2, 40
    ids = torch.tensor(rng.sample(range(1000), num_groups * num_rows * blocks), dtype=torch.int32)
    starts = torch.arange(num_groups * num_rows, dtype=torch.int32).reshape(num_groups, num_rows) * blocks
    return StepInputs(
        sampled=torch.tensor(sampled),
        tokens=torch.full((num_tokens,), 7),
        feeds=torch.full((num_tokens,), 5),
        positions=torch.full((num_tokens,), 7),
        query_starts=torch.full((num_rows + 1,), 7, dtype=torch.int32),
        context_lens=torch.full((num_rows,), 7, dtype=torch.int32),
        draws=torch.full((num_tokens + 3,), 7),
        slots=torch.full((num_groups, num_tokens), 7),
        block_ids=ids,
        block_starts=starts,
        block_tokens=BLOCK_TOKENS,
        proposals=torch.tensor([[rng.randrange(4) for _ in range(8)] for _ in range(6)], dtype=torch.int32),
        num_proposed=torch.tensor([rng.choice([0, 1, 3, 8]) for _ in range(6)], dtype=torch.int32),
        board=torch.tensor(posted(rng, [5, 9, 9]), dtype=torch.int32),
        taken=torch.full((3, TAKEN_WORDS), 7, dtype=torch.int32),
    )


def posted(rng: random.Random, starts: list[int]) -> NDArray[np.int32]:
    """Return a board with a random number of random lines in each slot, of few different tokens."""
    words = np.zeros((len(starts), BOARD_WORDS), np.int32)
    board = ProposalBoard(words)
    for start in starts:
        lines = [[rng.randrange(4) for _ in range(rng.randrange(9))] for _ in range(rng.randrange(1 + LINES))]
        board.post(board.take(), start, lines)
    return words


def settled(rows: list[OpenRow], given: StepInputs, *, on_kernel: bool) -> StepInputs:
    copies = StepInputs(*(x.clone() if isinstance(x, torch.Tensor) else x for x in given))  # type: ignore[arg-type]
    words = torch.from_numpy(pack_open_rows(rows))
    if on_kernel:
        with backend.interpreted():
            settle_open_rows(words, len(rows), copies)
    else:
        settle_open_rows(words, len(rows), copies)
    return copies


@pytest.mark.parametrize("on_kernel", [False, True])
def test_what_was_looked_up_on_the_device_counts_as_verified(on_kernel: bool) -> None:
    sampled = [11, 12, 13, 14, 90, 91]
    given = inputs(10, 3, sampled, random.Random(1))
    given.proposals[4, :3], given.num_proposed[4] = torch.tensor([11, 12, 55], dtype=torch.int32), 3
    given.proposals[5, :3], given.num_proposed[5] = torch.tensor([90, 12, 55], dtype=torch.int32), 0
    rows = [
        OpenRow(row=1, first=2, length=3, sample=4, start=9, feed=0, verified=[], outcomes=[(2, 13, [3])], slot=4),
        OpenRow(row=2, first=6, length=2, sample=8, start=3, feed=4, verified=[], outcomes=[], slot=5),
    ]
    found = settled(rows, given, on_kernel=on_kernel)
    assert found.tokens.tolist() == [7, 7, 13, 3, 0, 7, 90, 0, 7, 7]
    assert found.positions.tolist() == [7, 7, 11, 12, 13, 7, 3, 4, 7, 7]


@pytest.mark.parametrize("on_kernel", [False, True])
def test_the_outcome_that_came_true_counts(on_kernel: bool) -> None:
    sampled = [11, 12, 13, 14, 90, 91]
    given = inputs(10, 3, sampled, random.Random(1))
    outcomes = [(3, 14, [1, 2]), (2, 13, [3, 4]), (2, 99, [5, 6]), (2, 13, [8, 8])]
    rows = [
        OpenRow(row=1, first=2, length=3, sample=4, start=9, feed=0, verified=[11, 12, 55], outcomes=outcomes),
        OpenRow(row=2, first=6, length=2, sample=8, start=3, feed=4, verified=[], outcomes=[(0, 91, [1])]),
    ]
    found = settled(rows, given, on_kernel=on_kernel)
    assert found.tokens.tolist() == [7, 7, 13, 3, 4, 7, 90, 0, 7, 7]
    assert found.feeds.tolist() == [5, 5, -1, 5, 5, 5, -1, 5, 5, 5]
    assert found.positions.tolist() == [7, 7, 11, 12, 13, 7, 3, 4, 7, 7]
    assert found.draws.tolist() == [7, 7, 7, 7, 12, 13, 14, 7, 4, 5, 7, 7, 7]
    assert found.context_lens.tolist() == [7, 14, 5]
    for group in range(2):
        table = given.block_ids[int(given.block_starts[group, 1]) :].tolist()
        assert found.slots[group, 2:5].tolist() == [table[p // 4] * 4 + p % 4 for p in (11, 12, 13)]
    assert (found.slots[:, [0, 1, 5, 8, 9]] == 7).all()


def test_the_kernel_writes_what_the_reference_writes() -> None:
    rng = random.Random(3)
    for _ in range(40):
        num_rows = rng.randrange(1, 6)
        sampled = [rng.randrange(4) for _ in range(200)]
        rows: list[OpenRow] = []
        first = feed = 0
        for row in range(num_rows):
            length, verified = rng.choice([1, 2, 5, 9]), [rng.randrange(4) for _ in range(rng.choice([0, 1, 3, 20]))]
            outcomes = [
                (rng.randrange(3), rng.randrange(4), [rng.randrange(50) for _ in range(rng.randrange(length))])
                for _ in range(rng.choice([0, 1, 8, 30]))
            ]
            slot = row if rng.random() < 0.4 else -1  # looked up on the device
            lists = [] if slot >= 0 else verified
            start, on_board, keep = rng.randrange(90), -1, 0
            if row < 3 and rng.random() < 0.6:
                start, on_board, keep, outcomes = rng.choice([5, 9]), row, 5 - row, []
            rows.append(OpenRow(row, first, length, first + row % 2, start, feed, lists, outcomes, slot, on_board, keep))
            first, feed = first + length + 1, feed + 25
        given = inputs(first + 2, num_rows, sampled, rng)
        for kernel, reference in zip(settled(rows, given, on_kernel=True), settled(rows, given, on_kernel=False), strict=True):
            assert torch.equal(torch.as_tensor(kernel), torch.as_tensor(reference))


@pytest.mark.parametrize("on_kernel", [False, True])
def test_a_row_takes_what_is_posted_for_what_came(on_kernel: bool) -> None:
    sampled = [11, 12, 13, 14, 90, 91]
    given = inputs(12, 3, sampled, random.Random(1))
    words = np.zeros((3, BOARD_WORDS), np.int32)
    board = ProposalBoard(words)
    slots = [board.take() for _ in range(3)]
    board.post(slots[0], 9, [[11, 12, 99, 1, 2, 3], [11, 12, 13, 20], [11, 12, 13, 21, 22, 23], [11, 12, 13, 24]])
    board.post(slots[1], 3, [[90, 30, 31]])
    board.post(slots[2], 4, [[90, 40, 41]])  # of a text that is longer
    words[slots[1], 1] *= -1  # where a head's logits were not finite
    given = given._replace(board=torch.from_numpy(words))
    rows = [
        OpenRow(0, first=0, length=3, sample=0, start=9, feed=0, verified=[11, 12, 55], outcomes=[], posted=slots[0], keep=4),
        OpenRow(1, first=4, length=4, sample=4, start=3, feed=4, verified=[], outcomes=[], posted=slots[1], keep=5),
        OpenRow(2, first=9, length=2, sample=9, start=3, feed=4, verified=[], outcomes=[], posted=slots[2], keep=3),
    ]
    found = settled(rows, given, on_kernel=on_kernel)
    assert found.tokens.tolist() == [13, 21, 22, 7, 90, 30, 31, 0, 7, 90, 0, 7]
    assert found.positions.tolist() == [11, 12, 13, 7, 3, 4, 5, 6, 7, 3, 4, 7]
    assert found.num_proposed[3:].tolist() == [0, 2, 2]
    assert found.proposals[4, :2].tolist() == [21, 22]
    assert found.proposals[5, :2].tolist() == [30, 31]
    reports = [found.taken[slot, :6].tolist() for slot in slots]
    assert reports == [[2, 3, 0, 21, 22, 23], [2, 2, 1, 30, 31, 7], [0, 0, 0, 7, 7, 7]]


def test_a_board_has_so_many_slots() -> None:
    words = np.zeros((2, BOARD_WORDS), np.int32)
    board = ProposalBoard(words)
    first, second = board.take(), board.take()
    assert board.take() == -1
    board.post(first, 3, [[1] * (LINE_TOKENS + 1)] * (LINES + 1))
    assert words[first, 1 : 1 + LINES].tolist() == [LINE_TOKENS] * LINES
    board.give_back(first)
    assert board.take() == first != second
    assert not words[first].any()


def test_lists_that_are_too_long_are_refused() -> None:
    row = OpenRow(0, 0, 2, 0, 0, 0, [], [])
    with pytest.raises(ValueError, match="at most 64"):
        pack_open_rows([row._replace(verified=[1] * (MAX_VERIFIED + 1))])
    with pytest.raises(ValueError, match="no place"):
        pack_open_rows([row._replace(outcomes=[(0, 1, [2, 3])])])
