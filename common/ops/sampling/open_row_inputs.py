"""What settling open rows reads and writes, and how they are packed; see `open_rows.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_VERIFIED = 64
"""Tokens of a row that are verified at most, and outcomes that are foreseen."""
HEADER = 12
"""Words of a row before its lists: row, first, length, sample, start, feed, numbers of both lists, where they begin; the slot
of what the step ahead verifies, if only the device knows that; the slot of the board that the row takes its proposal from, and
the one where it leaves that for the next step."""


class StepInputs(NamedTuple):
    """What a step reads on the device, and is changed there.

    sampled: int64, the tokens of the step ahead. tokens, feeds, positions: int64 [tokens]; query_starts: int32 [rows + 1] and
    context_lens: int32 [rows], as in `DeviceBatch`; draws: int64, the positions of drawn tokens; slots: int64 [groups, tokens].
    block_ids: int32 and block_starts: int32 [groups, rows], as in `DeviceBatch`; block_tokens: of a block of any group.
    proposals: int32 [slots, tokens] and num_proposed: int32 [slots], what the step ahead verifies of rows whose proposals the
    device chose, as in `DeviceTexts`; those that are taken from the board are written there. board: int32 [slots, BOARD_WORDS];
    taken: int32 [slots, TAKEN_WORDS], written.
    """

    sampled: torch.Tensor
    tokens: torch.Tensor
    feeds: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    draws: torch.Tensor
    slots: torch.Tensor
    block_ids: torch.Tensor
    block_starts: torch.Tensor
    block_tokens: int
    proposals: torch.Tensor
    num_proposed: torch.Tensor
    board: torch.Tensor
    taken: torch.Tensor
