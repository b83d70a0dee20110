"""Penalties, masks and edits of logits on a device, in copies of the rows concerned: counts, one pass, then single tokens.

Counts are integers, so the order in which they are added doesn't matter; each float operation is rounded by itself, as on a
CPU, so these kernels must be launched without fusing products and sums.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops.sampling.adjustments import Adjustments
from common.ops.sizes import cdiv

BLOCK = 1024


@triton.jit
def count_kernel(
    counts,  # int32 [rows, vocab]: gets 2 · occurrences in the output, + 1 if in the prompt
    targets,  # int32 [n]: rows of `counts`; -1: nothing is counted
    ids,  # int32 [total]; -1: previous[feeds[index]]
    starts,  # int32 [n + 1]
    outputs,  # int32 [n]: where each row's output begins in `ids`
    feeds,  # int32 [n]
    previous,  # the tokens of the step before
    vocab,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(1)
    target = tl.load(targets + index)
    place = tl.load(starts + index) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = (place < tl.load(starts + index + 1)) & (target >= 0)
    token = tl.load(ids + place, mask=there, other=0).to(tl.int64)
    fed = tl.load(previous + tl.load(feeds + index)).to(tl.int64)
    token = tl.where(token < 0, fed, token)
    there = there & (token >= 0) & (token < vocab)
    generated = place >= tl.load(outputs + index)
    row = counts + target.to(tl.int64) * vocab
    tl.atomic_add(row + token, tl.full([BLOCK], 2, tl.int32), mask=there & generated, sem="relaxed")
    tl.atomic_or(row + token, tl.full([BLOCK], 1, tl.int32), mask=there & ~generated, sem="relaxed")


@triton.jit
def penalise_kernel(
    logits,
    rows,  # int32 [n]
    counts,  # int32 [n, vocab], of rows without a slot
    table,  # int32 [slots, vocab]
    slots,  # int32 [n]: rows of `table`; -1: of `counts`; -2: nothing is counted
    ids,  # int32: behind what `table` has of a row, the tokens [starts[i], starts[i + 1]) of its output
    starts,
    presence,
    frequency,
    repetition,  # float32 [n] each
    masks,  # int32 [masks, words], contiguous: which tokens may be drawn
    mask_of,  # int32 [n]: which mask; -1 none
    out,  # float32 [n, vocab]
    row_stride,
    words,
    vocab,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tokens < vocab
    row = logits + tl.load(rows + index).to(tl.int64) * row_stride
    own = index.to(tl.int64) * vocab
    x = tl.load(row + tokens, mask=there, other=0.0).to(tl.float32)
    if COUNTED:
        slot = tl.load(slots + index)
        count = tl.zeros([BLOCK], tl.int32)
        if slot >= 0:
            count = tl.load(table + slot.to(tl.int64) * vocab + tokens, mask=there, other=0)
            for place in range(tl.load(starts + index), tl.load(starts + index + 1)):
                count += tl.where(tokens == tl.load(ids + place), 2, 0)
        elif slot == -1:
            count = tl.load(counts + own + tokens, mask=there, other=0)
        factor = tl.load(repetition + index)
        if factor != 1.0:
            x = tl.where(count > 0, tl.where(x > 0, tl.math.div_rn(x, factor), x * factor), x)
        occurrences = count >> 1
        less = x - tl.load(frequency + index) * occurrences.to(tl.float32)
        x = tl.where(occurrences > 0, less - tl.load(presence + index), x)
    mask = tl.load(mask_of + index)
    if mask >= 0:
        bits = tl.load(masks + mask.to(tl.int64) * words + tokens // 32, mask=there, other=0)
        x = tl.where((bits >> (tokens % 32)) & 1 != 0, x, -float("inf"))
    tl.store(out + own + tokens, x, mask=there)


@triton.jit(do_not_specialize=["count"])
def edit_kernel(
    out,
    edit_rows,  # int32 [count], among the n
    edit_tokens,  # int32 [count]
    edit_values,  # float32 [count], added; None: tokens get -inf
    vocab,
    count,
    BLOCK: tl.constexpr,
):
    edits = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = edits < count
    token = tl.load(edit_tokens + edits, mask=there, other=0)
    there = there & (token >= 0) & (token < vocab)
    place = out + tl.load(edit_rows + edits, mask=there, other=0).to(tl.int64) * vocab + token
    if edit_values is None:
        value = tl.full([BLOCK], -float("inf"), tl.float32)
    else:
        value = tl.load(place, mask=there, other=0.0) + tl.load(edit_values + edits, mask=there, other=0.0)
    tl.store(place, value, mask=there)


def penalise_triton(
    logits: torch.Tensor,
    adjustments: Adjustments,
    previous: torch.Tensor,
    *,
    table: torch.Tensor | None,
    masks: torch.Tensor | None,
    block: int = BLOCK,
) -> torch.Tensor:
    """Returns float32 [n, vocab]. table: None if no row has a slot; masks: None if no row has one."""
    count, vocab = len(adjustments.rows), logits.shape[1]
    out = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    counts: torch.Tensor | None = None
    if adjustments.longest:
        counts = torch.zeros(count, vocab, dtype=torch.int32, device=logits.device)
        count_triton(
            counts,
            adjustments.targets,
            ids=adjustments.ids,
            starts=adjustments.starts,
            outputs=adjustments.outputs,
            feeds=adjustments.feeds,
            previous=previous,
            longest=adjustments.longest,
            block=block,
        )
    penalise_kernel[(cdiv(vocab, block), count)](
        logits=logits,
        rows=adjustments.rows,
        # where one is missing, no row is in it; the kernel is the same
        counts=table if counts is None else counts,
        table=counts if table is None else table,
        slots=adjustments.slots,
        ids=adjustments.ids,
        starts=adjustments.starts,
        presence=adjustments.presence,
        frequency=adjustments.frequency,
        repetition=adjustments.repetition,
        masks=adjustments.masks if masks is None else masks,
        mask_of=adjustments.masks,
        out=out,
        row_stride=logits.stride(0),
        words=0 if masks is None else masks.stride(0),
        vocab=vocab,
        COUNTED=counts is not None or table is not None,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def count_triton(
    counts: torch.Tensor,
    targets: torch.Tensor,
    *,
    ids: torch.Tensor,
    starts: torch.Tensor,
    outputs: torch.Tensor,
    feeds: torch.Tensor,
    previous: torch.Tensor,
    longest: int,
    block: int = BLOCK,
) -> None:
    """See `count_kernel`; longest: ids of the longest history."""
    count_kernel[(cdiv(longest, block), len(targets))](
        counts=counts,
        targets=targets,
        ids=ids,
        starts=starts,
        outputs=outputs,
        feeds=feeds,
        previous=previous,
        vocab=counts.shape[1],
        BLOCK=block,
        num_warps=4,
    )


def edit_triton(
    out: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor | None, *, block: int = 256
) -> None:
    """out: float32 [n, vocab], changed; values: added, or None for -inf. A token is in a row's additions once at most."""
    if len(rows):
        edit_kernel[(cdiv(len(rows), block),)](
            out=out,
            edit_rows=rows,
            edit_tokens=tokens,
            edit_values=values,
            vocab=out.shape[1],
            count=len(rows),
            BLOCK=block,
            num_warps=2,
        )
