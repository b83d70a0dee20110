"""`token_logprobs` on a GPU: each program takes a piece of a row, then one program a row takes what the pieces have found.

A logit and its token are one integer, ordered by the logit and then by the lower id, so that the likeliest tokens are the
largest integers whatever order they are found in. The largest is taken out as often as there are tokens to find.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from common.ops.sizes import cdiv, next_power_of_2

PIECE = 4096
"""Logits of a program."""
TOPS = (0, 8, 20, 64)
"""The number of likeliest tokens is rounded up to one of these: each takes a build of the kernels, and most are built at start.
More are found in torch."""
MAX_TOP = TOPS[-1]
_LOWEST = tl.constexpr(-(1 << 63))
_NO_LOGIT = tl.constexpr(-float("inf"))


@triton.jit
def _ordered(bits):
    """Of a float's bits, or back: integers in the order of the floats."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def logprob_pieces_kernel(
    logits,  # [rows, vocab_size]
    asking,  # [n], rows
    keys,  # int64 [n, pieces, NUM_TOP]
    tops,  # float32 [n, pieces]
    totals,  # float32 [n, pieces]
    row_stride,
    vocab_size,
    pieces,
    PIECE: tl.constexpr,
    NUM_TOP: tl.constexpr,
):
    piece = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * pieces + piece
    row = tl.load(asking + tl.program_id(0)).to(tl.int64)
    tokens = piece * PIECE + tl.arange(0, PIECE)
    inside = tokens < vocab_size
    values = tl.load(logits + row * row_stride + tokens, mask=inside, other=_NO_LOGIT).to(tl.float32) + 0.0  # one zero
    top = tl.max(values, axis=0)
    tl.store(tops + place, top)
    tl.store(totals + place, tl.sum(tl.exp(values - tl.where(top == _NO_LOGIT, 0.0, top)), axis=0))
    if NUM_TOP > 0:
        found = _ordered(values.to(tl.int32, bitcast=True)).to(tl.int64) << 32
        found = tl.where(inside, found | (vocab_size - 1 - tokens).to(tl.int64), _LOWEST)
        for index in tl.range(0, NUM_TOP):
            largest = tl.max(found, axis=0)
            tl.store(keys + place * NUM_TOP + index, largest)
            found = tl.where(found == largest, _LOWEST, found)


@triton.jit
def logprob_rows_kernel(
    logits,  # [rows, vocab_size]
    tokens,  # [rows], the chosen ones
    asking,  # [n], rows
    keys,  # int64 [n, pieces, NUM_TOP]
    tops,  # float32 [n, pieces]
    totals,  # float32 [n, pieces]
    chosen,  # float32 [n]
    ids,  # int64 [n, NUM_TOP]
    found,  # float32 [n, NUM_TOP]
    row_stride,
    vocab_size,
    pieces,
    PIECES: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_TOP: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(asking + place).to(tl.int64)
    piece = tl.arange(0, PIECES)
    each = tl.load(tops + place * pieces + piece, mask=piece < pieces, other=_NO_LOGIT)
    top = tl.max(each, axis=0)
    share = tl.where(each == _NO_LOGIT, 0.0, tl.exp(each - top))
    rest = tl.log(tl.sum(share * tl.load(totals + place * pieces + piece, mask=piece < pieces, other=0.0), axis=0))
    token = tl.load(tokens + row).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)  # of logits that are not finite there is none
    tl.store(chosen + place, tl.load(logits + row * row_stride + token).to(tl.float32) - top - rest)
    if NUM_TOP > 0:
        key = tl.arange(0, KEYS)
        every = tl.load(keys + place * pieces * NUM_TOP + key, mask=key < pieces * NUM_TOP, other=_LOWEST)
        for index in tl.range(0, NUM_TOP):
            largest = tl.max(every, axis=0)
            every = tl.where(every == largest, _LOWEST, every)
            value = _ordered((largest >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
            tl.store(ids + place * NUM_TOP + index, vocab_size - 1 - (largest & 0xFFFFFFFF))
            tl.store(found + place * NUM_TOP + index, value - top - rest)


class LogprobBuffers(NamedTuple):
    """What the kernels write for `n` rows. results: uint8, what `results_in` cuts into views. Scratch: keys, tops, totals."""

    results: torch.Tensor
    keys: torch.Tensor
    tops: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def create(cls, count: int, vocab_size: int, num_top: int, device: torch.device) -> LogprobBuffers:
        num_top, pieces = rounded_top(num_top), cdiv(vocab_size, PIECE)
        keys = torch.empty(count, pieces, num_top, dtype=torch.int64, device=device)
        tops, totals = torch.empty(2, count, pieces, dtype=torch.float32, device=device)
        results = torch.empty(count * (12 * num_top + 4), dtype=torch.uint8, device=device)
        return cls(results, keys, tops, totals)


def rounded_top(num_top: int) -> int:
    """Return how many likeliest tokens are found where `num_top`, `MAX_TOP` at most, are wanted."""
    return next(number for number in TOPS if number >= num_top)


def results_in(results: torch.Tensor, count: int, num_top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the results for `count` rows, or of a copy of them elsewhere; see `token_logprobs`."""
    wanted, num_top = num_top, rounded_top(num_top)
    middle, end = 8 * count * num_top, 12 * count * num_top
    ids = results[:middle].view(torch.int64).view(count, num_top)
    found = results[middle:end].view(torch.float32).view(count, num_top)
    return results[end:].view(torch.float32), ids[:, :wanted], found[:, :wanted]


def token_logprobs_triton(
    logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, num_top: int, buffers: LogprobBuffers | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `token_logprobs`, shapes checked by it. num_top: of the vocabulary, `MAX_TOP` at most. rows: not empty. Each row of
    `logits` is contiguous. With `buffers`, created for as many rows, results are views of theirs."""
    vocab_size, count = logits.shape[1], len(rows)
    buffers = buffers or LogprobBuffers.create(count, vocab_size, num_top, logits.device)
    chosen, ids, found = results_in(buffers.results, count, rounded_top(num_top))
    pieces, most = buffers.tops.shape[1], ids.shape[1]
    logprob_pieces_kernel[(count, pieces)](
        logits,
        rows,
        buffers.keys,
        buffers.tops,
        buffers.totals,
        logits.stride(0),
        vocab_size,
        pieces,
        PIECE=PIECE,
        NUM_TOP=most,
        num_warps=8,
    )
    logprob_rows_kernel[(count,)](
        logits,
        tokens,
        rows,
        buffers.keys,
        buffers.tops,
        buffers.totals,
        chosen,
        ids,
        found,
        logits.stride(0),
        vocab_size,
        pieces,
        PIECES=next_power_of_2(pieces),
        KEYS=next_power_of_2(max(1, pieces * most)),
        NUM_TOP=most,
        num_warps=4,
    )
    return chosen, ids[:, :num_top], found[:, :num_top]
