"""What a head needs of a step, a program for each row."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops.drafting.head_inputs import RING_TOKENS, ROW_HEADER, DraftRows, FirstPass, TargetStep
from common.ops.sampling.board_layout import BOARD_WORDS, LINE_TOKENS, LINES

_BLOCK = 64
"""Tokens at once, and at least as many as a row verifies."""


@triton.jit(do_not_specialize=["table_blocks", "num_lens"])
def prepare_rows_kernel(
    words,
    tokens,
    positions,
    sampled,
    temperature,
    log_min_p,
    top_k,
    top_p,
    seed,
    nexts,
    places,
    slots,
    context_lens,
    block_starts,
    selected,
    row_places,
    row_slots,
    row_lens,
    row_starts,
    contexts,
    lengths,
    row_temperature,
    row_min_p,
    row_top_k,
    row_top_p,
    row_seed,
    row_position,
    board,
    num_lens,
    table_blocks,
    HEADER: tl.constexpr,
    RING: tl.constexpr,
    LINES: tl.constexpr,
    LINE_TOKENS: tl.constexpr,
    BOARD_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = words + index * HEADER
    begin = tl.load(row)
    length = tl.load(row + 1)
    num_samples = tl.load(row + 2)
    sample = tl.load(row + 3)
    context = tl.load(row + 4)
    base = tl.load(row + 5)
    behind = tl.load(row + 6)
    has_context = context >= 0
    i = tl.arange(0, BLOCK)

    # the row's pairs
    unsampled = length - num_samples
    for at in range(0, length, BLOCK):
        k = at + i
        inside = k < length
        place = tl.load(positions + begin + k, mask=inside & has_context, other=0) - base
        place = tl.where(has_context, place, k)
        given = tl.load(tokens + begin + k + 1, mask=has_context & (k < unsampled) & (k + 1 < length), other=behind)
        came = tl.load(sampled + sample + k - unsampled, mask=inside & has_context & (k >= unsampled), other=0)
        following = tl.where(has_context, tl.where(k < unsampled, given, tl.maximum(came, 0)), 0)
        tl.store(nexts + begin + k, following, mask=inside)
        tl.store(places + begin + k, tl.maximum(place, 0).to(tl.int64), mask=inside)
        # a place before the context has no entry, and % of it is of no number that is used
        entry = context * RING + tl.maximum(place, 0) % RING
        tl.store(slots + begin + k, tl.where(has_context & (place >= 0), entry, -1).to(tl.int64), mask=inside)

    # what holds of what was verified
    drafts = has_context & (num_samples > 0)
    known = begin + unsampled
    is_proposed = drafts & (i < num_samples - 1)
    proposed = tl.load(tokens + known + 1 + i, mask=is_proposed, other=0)
    found = tl.load(sampled + sample + i, mask=is_proposed, other=0)
    accepted = tl.min(tl.where(is_proposed & (proposed != found), i, tl.maximum(num_samples - 1, 0)))
    last = tl.where(drafts, known + accepted, 0)
    num_came = tl.minimum(accepted + 1, LINE_TOKENS)
    last_place = tl.load(positions + last, mask=drafts, other=0) - base
    start = tl.load(positions + known, mask=drafts, other=0) + 1
    end = tl.load(positions + begin + length - 1, mask=has_context & (length > 0), other=0) - base

    tl.store(context_lens + index, tl.where(has_context, end + 1, length).to(tl.int32), mask=index < num_lens)
    tl.store(block_starts + index, tl.where(has_context, context * table_blocks, 0), mask=index < num_lens)
    tl.store(selected + index, last.to(tl.int64))
    tl.store(row_places + index, tl.where(drafts, tl.maximum(last_place, 0), 0).to(tl.int64))
    tl.store(row_slots + index, tl.full((), -1, tl.int64))
    tl.store(row_lens + index, tl.full((), 1, tl.int32))
    tl.store(row_starts + index, tl.where(drafts, context * table_blocks, 0))
    tl.store(contexts + index, tl.where(drafts, context, -1))
    tl.store(lengths + index, tl.where(drafts, num_came, LINE_TOKENS).to(tl.int32))
    draw = sample + accepted
    tl.store(row_temperature + index, tl.load(temperature + draw, mask=drafts, other=0.0))
    tl.store(row_top_k + index, tl.load(top_k + draw, mask=drafts, other=0))
    tl.store(row_top_p + index, tl.load(top_p + draw, mask=drafts, other=1.0))
    tl.store(row_min_p + index, tl.load(log_min_p + draw, mask=drafts, other=0.0), mask=drafts)
    tl.store(row_seed + index, tl.load(seed + draw, mask=drafts, other=0), mask=drafts)
    tl.store(row_position + index, (tl.load(positions + last, mask=drafts, other=0) + 2).to(tl.int64), mask=drafts)

    line = board + context * BOARD_WORDS
    tl.store(line, start.to(tl.int32), mask=drafts)
    tl.store(line + 1, num_came, mask=drafts)
    line_tokens = tl.arange(0, LINE_TOKENS)
    came = tl.load(sampled + sample + line_tokens, mask=drafts & (line_tokens < num_came), other=0)
    tl.store(line + 1 + LINES + line_tokens, came.to(tl.int32), mask=drafts & (line_tokens < num_came))


@triton.jit
def advance_drafts_kernel(
    drafted,
    tokens,
    places,
    slots,
    context_lens,
    contexts,
    lengths,
    position,
    board,
    RING: tl.constexpr,
    LINES: tl.constexpr,
    LINE_TOKENS: tl.constexpr,
    BOARD_WORDS: tl.constexpr,
):
    index = tl.program_id(0)
    token = tl.load(drafted + index)
    context = tl.load(contexts + index)
    length = tl.load(lengths + index)
    is_active = context >= 0
    tl.store(tokens + index, tl.maximum(token, 0))
    place = tl.load(places + index) + 1
    tl.store(places + index, place, mask=is_active)
    tl.store(slots + index, context * RING + place % RING, mask=is_active)
    tl.store(context_lens + index, (place + 1).to(tl.int32), mask=is_active)
    tl.store(position + index, tl.load(position + index) + 1, mask=is_active)
    line = board + context * BOARD_WORDS
    appends = is_active & (token >= 0) & (length < LINE_TOKENS)
    tl.store(line + 1 + LINES + length, token.to(tl.int32), mask=appends)
    tl.store(line + 1, length + 1, mask=appends)
    ends = is_active & (token < 0) & (length < LINE_TOKENS)
    tl.store(line + 1, -length, mask=ends)
    length = tl.where(appends, length + 1, tl.where(token < 0, LINE_TOKENS, length))
    tl.store(lengths + index, length, mask=is_active)


def prepare_rows_triton(
    words: torch.Tensor, step: TargetStep, first: FirstPass, rows: DraftRows, board: torch.Tensor, table_blocks: int
) -> None:
    """As `prepare_rows`."""
    first.slots.fill_(-1)
    prepare_rows_kernel[(len(rows.selected),)](
        words=words,
        tokens=step.tokens,
        positions=step.positions,
        sampled=step.sampled,
        temperature=step.draws.temperature,
        log_min_p=step.draws.log_min_p,
        top_k=step.draws.top_k,
        top_p=step.draws.top_p,
        seed=step.draws.seed,
        nexts=first.nexts,
        places=first.places,
        slots=first.slots,
        context_lens=first.context_lens,
        block_starts=first.block_starts,
        selected=rows.selected,
        row_places=rows.places,
        row_slots=rows.slots,
        row_lens=rows.context_lens,
        row_starts=rows.block_starts,
        contexts=rows.contexts,
        lengths=rows.lengths,
        row_temperature=rows.draws.temperature,
        row_min_p=rows.draws.log_min_p,
        row_top_k=rows.draws.top_k,
        row_top_p=rows.draws.top_p,
        row_seed=rows.draws.seed,
        row_position=rows.draws.position,
        board=board,
        num_lens=len(first.context_lens),
        table_blocks=table_blocks,
        HEADER=ROW_HEADER,
        RING=RING_TOKENS,
        LINES=LINES,
        LINE_TOKENS=LINE_TOKENS,
        BOARD_WORDS=BOARD_WORDS,
        BLOCK=_BLOCK,
        num_warps=1,
    )


def advance_drafts_triton(drafted: torch.Tensor, rows: DraftRows, board: torch.Tensor) -> None:
    """As `advance_drafts`."""
    advance_drafts_kernel[(len(drafted),)](
        drafted=drafted,
        tokens=rows.tokens,
        places=rows.places,
        slots=rows.slots,
        context_lens=rows.context_lens,
        contexts=rows.contexts,
        lengths=rows.lengths,
        position=rows.draws.position,
        board=board,
        RING=RING_TOKENS,
        LINES=LINES,
        LINE_TOKENS=LINE_TOKENS,
        BOARD_WORDS=BOARD_WORDS,
        num_warps=1,
    )
