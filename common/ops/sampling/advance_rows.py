"""Turns the inputs of a decode step into those of the next one, where each row computes the token that was sampled for it.

advance_rows(inputs)    feeds, positions, context lengths, slots and draws of rows of one token, one position further

The device has all that a host would pack for such a step: the token is in `StepInputs.sampled`, the position is the next one,
and the block is in the row's table.
"""

from __future__ import annotations

import torch

from common.ops.backend import on_device
from common.ops.sampling.open_row_inputs import StepInputs


def advance_rows(inputs: StepInputs) -> None:
    """inputs: of a step with one token and one sample a row, sample i being that of row i; changed in place. The rows' tables
    must hold a block for the next token. Rows without a slot in the first cache group are padding, and stay. Waits for nothing.
    """
    if on_device(inputs.positions):
        from common.ops.sampling.advance_rows_triton import advance_rows_triton

        advance_rows_triton(inputs)
    else:
        advance_rows_reference(inputs)


def advance_rows_reference(inputs: StepInputs) -> None:
    """As `advance_rows`."""
    rows = (inputs.slots[0, : len(inputs.context_lens)] >= 0).nonzero()[:, 0]
    place = inputs.positions[rows] + 1
    inputs.feeds[rows] = rows
    inputs.positions[rows] = place
    inputs.draws[rows] = place + 1
    inputs.context_lens[rows] = (place + 1).to(torch.int32)
    for slots, starts in zip(inputs.slots, inputs.block_starts, strict=True):
        blocks = inputs.block_ids[starts[rows] + place // inputs.block_tokens].long()
        slots[rows] = blocks * inputs.block_tokens + place % inputs.block_tokens
