"""What a head needs of the step that it drafts behind, worked out on the device: the host does not know yet what was sampled.

prepare_rows(words, step, first, rows, board)   before the head's first pass: its inputs for every token of the step, and which
                                                token of each row was the last one that holds
advance_drafts(drafted, rows, board)            behind each pass: the drafted token goes on the board, and into the next pass
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.ops.backend import on_device
from common.ops.drafting.head_inputs import NO_CONTEXT, RING_TOKENS, ROW_HEADER, DraftRows, FirstPass, HeadRow, TargetStep
from common.ops.sampling.board_layout import LINE_TOKENS, LINES


def pack_head_rows(rows: Sequence[HeadRow], into: NDArray[np.int32]) -> None:
    """into: int32 [most rows · ROW_HEADER]. Rows behind those of the step are empty.

    :raises ValueError: for more rows, or two rows with one context.
    """
    contexts = [row.context for row in rows if row.context != NO_CONTEXT]
    if len(rows) * ROW_HEADER > len(into) or len(set(contexts)) < len(contexts):
        raise ValueError(f"{len(rows)} rows don't fit, or two of them have one context")
    words = into.reshape(-1, ROW_HEADER)
    words[: len(rows)] = np.array(rows, np.int32).reshape(-1, ROW_HEADER)
    words[len(rows) :] = 0
    words[len(rows) :, 4] = NO_CONTEXT


def prepare_rows(
    words: torch.Tensor, step: TargetStep, first: FirstPass, rows: DraftRows, board: torch.Tensor, table_blocks: int
) -> None:
    """Write `first`, `rows`, and the beginning of each row's line on the board: what was sampled and holds.

    words: int32, of `pack_head_rows`, for as many rows as `rows` has. board: int32 [contexts, BOARD_WORDS]. table_blocks: of
    a context's block table. Waits for nothing.
    """
    if on_device(words):
        from common.ops.drafting.head_rows_triton import prepare_rows_triton

        prepare_rows_triton(words, step, first, rows, board, table_blocks)
    else:
        prepare_rows_reference(words, step, first, rows, board, table_blocks)


def advance_drafts(drafted: torch.Tensor, rows: DraftRows, board: torch.Tensor) -> None:
    """drafted: int64 [rows], what was drawn behind each row, -1 where a logit was not finite: then the row's line ends there,
    and its length becomes negative. Else it goes on the board, unless the line has ended, and is the row's token in the next
    pass."""
    if on_device(drafted):
        from common.ops.drafting.head_rows_triton import advance_drafts_triton

        advance_drafts_triton(drafted, rows, board)
    else:
        advance_drafts_reference(drafted, rows, board)


def prepare_rows_reference(
    words: torch.Tensor, step: TargetStep, first: FirstPass, rows: DraftRows, board: torch.Tensor, table_blocks: int
) -> None:
    """As `prepare_rows`."""
    first.slots.fill_(-1)
    for index, (begin, length, num_samples, sample, context, base, following) in enumerate(words.view(-1, ROW_HEADER).tolist()):
        rows.contexts[index], rows.lengths[index], rows.selected[index] = NO_CONTEXT, LINE_TOKENS, 0
        rows.places[index], rows.slots[index], rows.context_lens[index], rows.block_starts[index] = 0, -1, 1, 0
        rows.draws.temperature[index], rows.draws.top_k[index], rows.draws.top_p[index] = 0.0, 0, 1.0
        if index < len(first.context_lens):
            first.context_lens[index], first.block_starts[index] = length, 0
        if not length:
            continue
        span, known = slice(begin, begin + length), begin + length - num_samples
        first.places[span] = torch.arange(length, device=words.device)
        first.nexts[span] = 0
        if context == NO_CONTEXT:
            continue
        place = step.positions[span] - base
        first.nexts[begin : begin + length - 1] = step.tokens[begin + 1 : begin + length]
        first.nexts[begin + length - 1] = following
        first.nexts[known : begin + length] = step.sampled[sample : sample + num_samples].clamp_min(0)
        first.places[span] = place.clamp_min(0)
        first.slots[span] = torch.where(place < 0, -1, context * RING_TOKENS + place % RING_TOKENS)
        first.context_lens[index], first.block_starts[index] = int(place[-1]) + 1, context * table_blocks
        if not num_samples:
            continue
        sampled = step.sampled[sample : sample + num_samples].tolist()
        proposed = step.tokens[known + 1 : begin + length].tolist()
        accepted = next((i for i, token in enumerate(proposed) if token != sampled[i]), len(proposed))
        last, line = known + accepted, board[context]
        came = sampled[: accepted + 1][:LINE_TOKENS]
        line[0], line[1] = int(step.positions[known]) + 1, len(came)
        line[1 + LINES : 1 + LINES + len(came)] = torch.tensor(came, dtype=torch.int32)
        rows.selected[index], rows.contexts[index], rows.lengths[index] = last, context, len(came)
        rows.places[index], rows.block_starts[index] = first.places[last], context * table_blocks
        for name in ("temperature", "seed", "top_k", "top_p", "log_min_p"):
            getattr(rows.draws, name)[index] = getattr(step.draws, name)[sample + accepted]
        rows.draws.position[index] = int(step.positions[last]) + 2


def advance_drafts_reference(drafted: torch.Tensor, rows: DraftRows, board: torch.Tensor) -> None:
    """As `advance_drafts`."""
    given = drafted.tolist(), rows.contexts.tolist(), rows.lengths.tolist()
    for index, (token, context, length) in enumerate(zip(*given, strict=False)):
        rows.tokens[index] = max(0, token)
        if context == NO_CONTEXT:
            continue
        if token < 0:
            if length < LINE_TOKENS:
                board[context, 1] = -length
            rows.lengths[index] = LINE_TOKENS
        elif length < LINE_TOKENS:
            board[context, 1 + LINES + length] = token
            board[context, 1] = rows.lengths[index] = length + 1
        place = rows.places[index] = rows.places[index] + 1
        rows.slots[index] = context * RING_TOKENS + place % RING_TOKENS
        rows.context_lens[index] = place + 1
        rows.draws.position[index] += 1
