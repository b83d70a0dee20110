"""A step's inputs a token further: what the kernel writes is what the reference writes, and what a host would have packed."""

from __future__ import annotations

import random

import pytest
import torch

from common.ops import backend
from common.ops.sampling.advance_rows import advance_rows
from common.ops.sampling.open_row_inputs import StepInputs
from tests.ops.test_open_rows import BLOCK_TOKENS, inputs

CHANGED = ("feeds", "positions", "context_lens", "draws", "slots")


def packed(num_rows: int, num_used: int, starts: list[int], seed: int) -> StepInputs:
    """A step of `num_used` rows, each with one token at its start, and padding behind them."""
    rng = random.Random(seed)
    given = inputs(num_rows, 1, [0], rng)
    blocks = 16
    given = given._replace(
        context_lens=torch.zeros(num_rows, dtype=torch.int32),
        block_ids=torch.tensor([rng.randrange(1000) for _ in range(2 * num_rows * blocks)], dtype=torch.int32),
        block_starts=torch.arange(2 * num_rows, dtype=torch.int32).reshape(2, num_rows) * blocks,
    )
    given.slots[:] = -1
    given.positions[:], given.context_lens[:], given.feeds[:] = 0, 0, -1
    for row, start in enumerate(starts[:num_used]):
        given.positions[row], given.context_lens[row], given.draws[row] = start, start + 1, start + 1
        for slots, tables in zip(given.slots, given.block_starts, strict=True):
            block = given.block_ids[int(tables[row]) + start // BLOCK_TOKENS]
            slots[row] = int(block) * BLOCK_TOKENS + start % BLOCK_TOKENS
    return given


@pytest.mark.parametrize("on_kernel", [False, True])
@pytest.mark.parametrize(("num_rows", "num_used"), [(1, 1), (8, 5), (70, 66)])
def test_rows_are_a_token_further_and_padding_stays(num_rows: int, num_used: int, on_kernel: bool) -> None:
    starts = [random.Random(row).randrange(60) for row in range(num_used)]
    starts[0] = BLOCK_TOKENS - 1  # the next token has another block
    given = packed(num_rows, num_used, starts, seed=1)
    expected = packed(num_rows, num_used, [start + 1 for start in starts], seed=1)
    expected.feeds[:num_used] = torch.arange(num_used)
    if on_kernel:
        with backend.interpreted():
            advance_rows(given)
    else:
        advance_rows(given)
    for name in CHANGED:
        assert torch.equal(getattr(given, name), getattr(expected, name)), name
    assert torch.equal(given.tokens, expected.tokens)
