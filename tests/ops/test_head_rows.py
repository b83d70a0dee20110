"""What a head needs of a step: kernel and reference write what a host that knew the samples would."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from common.ops import backend
from common.ops.drafting.head_inputs import NO_CONTEXT, RING_TOKENS, ROW_HEADER, DraftRows, FirstPass, HeadRow, TargetStep
from common.ops.drafting.head_rows import advance_drafts, pack_head_rows, prepare_rows
from common.ops.sampling.board_layout import BOARD_WORDS, LINE_TOKENS, LINES
from common.ops.sampling.sample_device import DrawBatch

CPU = torch.device("cpu")
TABLE = 300
MOST_ROWS = 8


class Site(NamedTuple):
    step: TargetStep
    first: FirstPass
    rows: DraftRows
    board: torch.Tensor


def site(tokens: list[int], positions: list[int], sampled: list[int], *, num_rows: int = 6) -> Site:
    draws = DrawBatch.create(len(sampled) + 9, CPU)
    draws.temperature[:] = torch.arange(len(draws.temperature)) / 10
    draws.seed[:] = torch.arange(len(draws.seed)) + 70
    draws.log_min_p[:] = -torch.arange(len(draws.seed)).float()
    draws.top_k[:] = torch.arange(len(draws.seed)) % 3
    draws.top_p[:] = 1 / (1 + torch.arange(len(draws.seed), dtype=torch.float64))
    step = TargetStep(torch.tensor(tokens), torch.tensor(positions), torch.tensor([*sampled, *[0] * 80]), draws)
    count = len(tokens)
    wide = [torch.full((count,), 7) for _ in range(3)]
    narrow = [torch.full((num_rows,), 7, dtype=torch.int32) for _ in range(2)]
    board = torch.zeros(5, BOARD_WORDS, dtype=torch.int32)
    return Site(step, FirstPass(*wide, *narrow), DraftRows.create(MOST_ROWS, CPU), board)


def prepared(given: Site, rows: list[HeadRow], *, on_kernel: bool) -> Site:
    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    first, board = FirstPass(*map(copied, given.first)), given.board.clone()
    drafts = DraftRows.create(MOST_ROWS, CPU)
    words = np.zeros(MOST_ROWS * ROW_HEADER, np.int32)
    pack_head_rows(rows, words)
    if on_kernel:
        with backend.interpreted():
            prepare_rows(torch.from_numpy(words), given.step, first, drafts, board, TABLE)
    else:
        prepare_rows(torch.from_numpy(words), given.step, first, drafts, board, TABLE)
    return Site(given.step, first, drafts, board)


def line(board: torch.Tensor, context: int) -> tuple[int, list[int]]:
    """The start and the tokens of a context's line."""
    words = board[context].tolist()
    return words[0], words[1 + LINES :][: abs(words[1])]


@pytest.mark.parametrize("on_kernel", [False, True])
def test_a_row_goes_on_from_the_last_token_that_holds(on_kernel: bool) -> None:
    tokens, sampled = [5, 11, 12, 99, 30, 40, 41], [11, 12, 13, 14, 31, 90]
    given = site(tokens, [20, 21, 22, 23, 9, 0, 1], sampled)
    rows = [HeadRow(0, 4, 4, 0, 3, 16), HeadRow(4, 1, 1, 4, NO_CONTEXT, 0), HeadRow(5, 2, 1, 5, 1, 0)]
    found = prepared(given, rows, on_kernel=on_kernel)
    assert found.first.nexts.tolist() == [11, 12, 13, 14, 0, 41, 90]
    assert found.first.places.tolist() == [4, 5, 6, 7, 0, 0, 1]
    assert found.first.slots.tolist() == [3 * RING_TOKENS + at for at in (4, 5, 6, 7)] + [-1, RING_TOKENS, RING_TOKENS + 1]
    assert found.first.context_lens.tolist() == [8, 1, 2, 0, 0, 0]
    assert found.first.block_starts.tolist() == [3 * TABLE, 0, TABLE, 0, 0, 0]
    assert found.rows.selected.tolist() == [2, 0, 6, 0, 0, 0, 0, 0]
    assert found.rows.places.tolist() == [6, 0, 1, 0, 0, 0, 0, 0]
    assert found.rows.contexts.tolist() == [3, -1, 1, *[NO_CONTEXT] * 5]
    assert line(found.board, 3) == (21, [11, 12, 13])
    assert line(found.board, 1) == (2, [90])
    draws = found.rows.draws
    assert draws.position[:3].tolist() == [24, 0, 3]
    assert draws.seed[:3].tolist() == [72, 0, 75]
    torch.testing.assert_close(draws.temperature[:3], torch.tensor([0.2, 0.0, 0.5]))
    drafted = torch.tensor([14, 3, -1])
    for step in range(2):
        if on_kernel:
            with backend.interpreted():
                advance_drafts(drafted, found.rows, found.board)
        else:
            advance_drafts(drafted, found.rows, found.board)
        assert found.rows.tokens[:3].tolist() == [14, 3, 0]
        assert found.rows.places[:3].tolist() == [7 + step, 0, 2 + step]
        assert found.rows.context_lens[:3].tolist() == [8 + step, 1, 3 + step]
        assert found.rows.slots[:3].tolist() == [3 * RING_TOKENS + 7 + step, -1, RING_TOKENS + 2 + step]
        assert draws.position[:3].tolist() == [25 + step, 0, 4 + step]
    assert line(found.board, 3) == (21, [11, 12, 13, 14, 14])
    assert line(found.board, 1) == (2, [90]), "a logit that is not finite ends the line"
    assert found.board[:4, 1].tolist() == [0, -1, 0, 5], "and says so"


@pytest.mark.parametrize("on_kernel", [False, True])
def test_a_line_is_no_longer_than_a_line(on_kernel: bool) -> None:
    """More tokens may hold than fit: lookup verifies up to 32."""
    tokens = list(range(21))
    found = prepared(site(tokens, tokens, [*range(1, 21), 50]), [HeadRow(0, 21, 21, 0, 2, 0)], on_kernel=on_kernel)
    assert line(found.board, 2) == (1, list(range(1, LINE_TOKENS + 1)))
    before = found.board.clone()
    if on_kernel:
        with backend.interpreted():
            advance_drafts(torch.tensor([9]), found.rows, found.board)
    else:
        advance_drafts(torch.tensor([9]), found.rows, found.board)
    assert torch.equal(found.board, before)


def test_the_kernel_writes_what_the_reference_writes() -> None:
    rng = random.Random(3)
    for _ in range(40):
        tokens, positions, sampled, rows = list[int](), list[int](), list[int](), list[HeadRow]()
        contexts = rng.sample(range(5), 5)
        for _ in range(rng.randrange(1, 6)):
            length = rng.choice([1, 2, 5, 9, 70, 150])
            num_samples = rng.choice([0, 1, min(length, 4)])
            start, context = rng.randrange(3000), rng.choice([contexts.pop(), NO_CONTEXT])
            base = start + rng.choice([-start, 0, length - 1, -20 if start > 20 else 0])
            rows.append(HeadRow(len(tokens), length, num_samples, len(sampled), context, base, rng.randrange(9)))
            tokens += [rng.randrange(3) for _ in range(length)]
            positions += range(start, start + length)
            sampled += [rng.choice([0, 1, 2, 2, 1, 0, -1]) for _ in range(num_samples)]
        tokens, positions = [*tokens, 7, 7], [*positions, 0, 0]
        given = site(tokens, positions, sampled, num_rows=rng.choice([len(rows), MOST_ROWS + 3]))
        expected, found = (prepared(given, rows, on_kernel=on_kernel) for on_kernel in (False, True))
        for name in FirstPass._fields:
            assert torch.equal(getattr(found.first, name), getattr(expected.first, name)), name
        active = expected.rows.contexts >= 0
        for name in DraftRows._fields[:-1]:
            assert torch.equal(getattr(found.rows, name), getattr(expected.rows, name)), name
        for name in ("temperature", "seed", "position", "log_min_p", "top_k", "top_p"):
            assert torch.equal(getattr(found.rows.draws, name)[active], getattr(expected.rows.draws, name)[active]), name
        idle = found.rows.draws
        assert not idle.temperature[~active].any() and not idle.top_k[~active].any() and (idle.top_p[~active] == 1).all()
        assert torch.equal(found.board, expected.board)
        drafted = torch.tensor([rng.choice([-1, 0, 5, 9]) for _ in range(MOST_ROWS)])
        advance_drafts(drafted, expected.rows, expected.board)
        with backend.interpreted():
            advance_drafts(drafted, found.rows, found.board)
        for name in DraftRows._fields[:-1]:
            assert torch.equal(getattr(found.rows, name), getattr(expected.rows, name)), name
        assert torch.equal(found.board, expected.board)


def test_rows_that_share_a_context_or_are_too_many_are_refused() -> None:
    words = np.zeros(2 * ROW_HEADER, np.int32)
    with pytest.raises(ValueError, match="one context"):
        pack_head_rows([HeadRow(0, 1, 1, 0, 1, 0), HeadRow(1, 1, 1, 1, 1, 0)], words)
    with pytest.raises(ValueError, match="fit"):
        pack_head_rows([HeadRow(0, 1, 1, 0, NO_CONTEXT, 0)] * 3, words)
