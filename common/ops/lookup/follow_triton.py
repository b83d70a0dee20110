"""Lookup by a program for each text: a block of new tokens is linked at once, and all occurrences are compared at once."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops.lookup.device_texts import (
    BLOCK,
    CANDIDATES,
    MAX_MATCH,
    MAX_PROPOSAL,
    MIN_MATCH,
    REPORT_HEADER,
    REPORT_WORDS,
    ROW_HEADER,
    DeviceTexts,
    FollowedStep,
)


@triton.jit
def _append(tokens, links, heads, length, source, count, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """Link `count` tokens at `source` behind the first `length` of a text, whose rows of the tables are given."""
    i = tl.arange(0, BLOCK)
    for begin in range(0, count, BLOCK):
        inside = begin + i < count
        position = length + begin + i
        token = tl.load(source + begin + i, mask=inside, other=0).to(tl.int64)
        # the token before the first new one is in the table already
        before = tl.load(source + begin + i - 1, mask=inside & (begin + i > 0), other=0).to(tl.int64)
        end = tl.load(tokens + ((length - 1) & (CAPACITY - 1))).to(tl.int64)
        before = tl.where(begin + i > 0, before, end)
        bucket = ((before * 0x2545F491 + token * 0x1B873593) >> 15) & (CAPACITY - 1)  # device_texts.bucket_of
        is_pair = inside & (position > 0)
        bucket = tl.where(is_pair, bucket, -1 - i)  # equal to no other
        head = tl.load(heads + bucket, mask=is_pair, other=-1)
        same = bucket[:, None] == bucket[None, :]
        earlier = tl.max(tl.where(same & (i[None, :] < i[:, None]), i[None, :], -1), 1)
        latest = tl.max(tl.where(same, i[None, :], -1), 1)
        previous = tl.where(earlier >= 0, length + begin + earlier, head)
        tl.debug_barrier()  # all heads are read before any is changed
        tl.store(tokens + (position & (CAPACITY - 1)), token.to(tl.int32), mask=inside)
        tl.store(links + (position & (CAPACITY - 1)), previous, mask=inside)
        tl.store(heads + bucket, position, mask=is_pair & (latest == i))
        tl.debug_barrier()


@triton.jit
def follow_rows_kernel(
    words,
    sampled,
    step_tokens,
    positions,
    tokens,  # [slots, CAPACITY], as links and heads
    links,
    heads,
    lengths,
    lags,
    proposals,  # [slots, PROPOSAL]
    num_proposed,
    report,  # [rows, WORDS]
    CAPACITY: tl.constexpr,
    HEADER: tl.constexpr,
    CLEAR: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MIN_MATCH: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    PROPOSAL: tl.constexpr,
    REPORT: tl.constexpr,
    WORDS: tl.constexpr,
):
    header = words + tl.program_id(0) * HEADER
    slot = tl.load(header)
    first = tl.load(header + 1)
    start = tl.load(header + 2)
    feed = tl.load(header + 3)
    room = tl.load(header + 4)
    source = words + tl.load(header + 5)
    num_sent = tl.load(header + 6)
    begin = tl.load(header + 7)
    base = slot.to(tl.int64) * CAPACITY
    tokens += base
    links += base
    heads += base
    length = tl.load(lengths + slot)
    lag = tl.load(lags + slot)
    if tl.load(header + 8) != 0:
        length = length * 0  # of the same type
        lag = lag * 0
        i = tl.arange(0, CLEAR)
        for cleared in range(0, CAPACITY, CLEAR):
            tl.store(heads + cleared + i, tl.full((CLEAR,), -1, tl.int32))
        tl.debug_barrier()
    known = tl.minimum(num_sent, tl.maximum(length - begin, 0))
    _append(tokens, links, heads, length, source + known, num_sent - known, CAPACITY, BLOCK)
    length += num_sent - known
    if feed >= 0:
        count = (tl.load(positions + first) - start + 1).to(tl.int32)
        _append(tokens, links, heads, length, sampled + feed, count, CAPACITY, BLOCK)
        length += count
    tl.store(lengths + slot, length)
    if room < 0:
        tl.store(lags + slot, lag)
        tl.store(num_proposed + slot, 0)
        return

    last = length - 1
    oldest = tl.maximum(length - CAPACITY, 0)
    c = tl.arange(0, CANDIDATES)
    hint = tl.where((lag > 0) & (last - lag >= oldest), last - lag, -1)
    places = tl.where(c == 0, hint, -1)
    chain = tl.load(links + (last & (CAPACITY - 1)), mask=last > 0, other=-1)
    for candidate in tl.static_range(1, CANDIDATES):
        chain = tl.where((chain >= oldest) & (chain < last), chain, -1)
        places = tl.where((c == candidate) & (chain != hint), chain, places)
        chain = tl.load(links + (chain & (CAPACITY - 1)), mask=chain >= 0, other=-1)

    k = tl.arange(0, MAX_MATCH)
    end = tl.load(tokens + ((last - k) & (CAPACITY - 1)), mask=last - k >= oldest, other=0)
    back = places[:, None] - k[None, :]
    is_there = (places[:, None] >= 0) & (back >= oldest)
    occurred = tl.load(tokens + (back & (CAPACITY - 1)), mask=is_there, other=0)
    same = tl.min(tl.where(is_there & (occurred == end[None, :]), MAX_MATCH, k[None, :]), 1)
    longest = tl.max(same)
    longest = tl.where(longest >= MIN_MATCH, longest, 0)
    is_found = (same == longest) & (longest > 0)
    behind = tl.load(tokens + ((places + 1) & (CAPACITY - 1)), mask=is_found, other=0)
    agrees = (behind[:, None] == behind[None, :]) & is_found[None, :]
    votes = tl.sum(agrees.to(tl.int32), 1)
    num_found = tl.sum(is_found.to(tl.int32))
    best = tl.max(tl.where(is_found, votes * CANDIDATES + CANDIDATES - 1 - c, 0))
    num_agreeing = best // CANDIDATES
    chosen = CANDIDATES - 1 - best % CANDIDATES
    place = tl.sum(tl.where(c == chosen, places, 0))

    num_tokens = tl.where(longest > 0, room, 0)
    period = tl.where(longest > 0, last - place, 1)
    j = tl.arange(0, PROPOSAL)
    copied = tl.load(tokens + ((place + 1 + j % period) & (CAPACITY - 1)), mask=(longest > 0) & (j < PROPOSAL), other=0)
    tl.store(step_tokens + first + 1 + j, copied.to(tl.int64), mask=j < room)
    tl.store(proposals + slot * PROPOSAL + j, copied)
    tl.store(num_proposed + slot, num_tokens)
    tl.store(lags + slot, tl.where(longest > 0, period, lag))
    report += tl.program_id(0) * WORDS
    tl.store(report, num_tokens)
    tl.store(report + 1, longest)
    tl.store(report + 2, num_found)
    tl.store(report + 3, num_agreeing)
    tl.store(report + REPORT + j, copied)


def follow_rows_triton(texts: DeviceTexts, words: torch.Tensor, num_rows: int, step: FollowedStep) -> None:
    """As `follow_rows`."""
    if num_rows:
        follow_rows_kernel[(num_rows,)](
            words=words,
            sampled=step.sampled,
            step_tokens=step.tokens,
            positions=step.positions,
            tokens=texts.tokens,
            links=texts.links,
            heads=texts.heads,
            lengths=texts.lengths,
            lags=texts.lags,
            proposals=texts.proposals,
            num_proposed=texts.num_proposed,
            report=step.report,
            CAPACITY=texts.capacity,
            HEADER=ROW_HEADER,
            CLEAR=min(texts.capacity, 1024),
            BLOCK=BLOCK,
            CANDIDATES=CANDIDATES,
            MIN_MATCH=MIN_MATCH,
            MAX_MATCH=MAX_MATCH,
            PROPOSAL=MAX_PROPOSAL,
            REPORT=REPORT_HEADER,
            WORDS=REPORT_WORDS,
            num_warps=4,
        )
