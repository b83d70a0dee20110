"""Turns the inputs of a decode step into those of a next one that has other rows, too.

advance_with_given(inputs, given)    what is new of block tables; rows of one token, one position further, or as the host says

Most rows of such a step go on as in `advance_rows.py`. What the host says of the others, and of block tables, is one small
upload: `given_row_layout.py` has its layout.
"""

from __future__ import annotations

import torch

from common.ops.backend import on_device
from common.ops.sampling.advance_rows import advance_rows_reference
from common.ops.sampling.given_row_layout import ENDS, GIVEN, PLACE_SHIFT, GivenRows
from common.ops.sampling.open_row_inputs import StepInputs


def advance_with_given(inputs: StepInputs, given: GivenRows[torch.Tensor]) -> None:
    """Advance the rows that go on as `advance_rows` does, and write the others as `given` has them. Waits for nothing.

    inputs: of a step with one token and one sample a row, sample i being that of row i, and at most `MAX_ROWS` rows; changed
    in place, block tables among them. given: on the same device.
    """
    if on_device(inputs.positions):
        from common.ops.sampling.given_rows_triton import advance_with_given_triton

        advance_with_given_triton(inputs, given)
    else:
        advance_with_given_reference(inputs, given)


def advance_with_given_reference(inputs: StepInputs, given: GivenRows[torch.Tensor]) -> None:
    """As `advance_with_given`."""
    num_rows, num_changes = map(int, given.head)
    changes = given.changes[:num_changes]
    inputs.block_ids[changes >> PLACE_SHIFT] = changes.to(torch.int32)  # its low half
    capacity = len(inputs.context_lens)
    kinds = given.kinds[:capacity]
    ends, fresh = (kinds == ENDS).nonzero()[:, 0], (kinds == GIVEN).nonzero()[:, 0]
    inputs.slots[:, torch.cat((ends, fresh))] = -1  # so that they are not advanced
    advance_rows_reference(inputs)
    for field, nothing in ((inputs.tokens, 0), (inputs.feeds, -1), (inputs.positions, 0), (inputs.context_lens, 0)):
        field[ends] = nothing
    inputs.block_starts[:, ends] = 0
    inputs.tokens[fresh], inputs.feeds[fresh] = given.tokens[fresh], given.feeds[fresh]
    place = inputs.positions[fresh] = given.positions[fresh]
    inputs.draws[fresh] = place + 1
    inputs.context_lens[fresh] = (place + 1).to(torch.int32)
    inputs.block_starts[:, fresh] = given.starts[:, fresh].to(torch.int32)
    for slots, starts in zip(inputs.slots, inputs.block_starts, strict=True):
        blocks = inputs.block_ids[starts[fresh] + place // inputs.block_tokens].long()
        slots[fresh] = blocks * inputs.block_tokens + place % inputs.block_tokens
    ends_at = torch.arange(1, capacity + 1, device=inputs.query_starts.device).clamp(max=num_rows)
    inputs.query_starts[1:] = ends_at.to(torch.int32)
