"""Rows of logits as groups of 256 tokens: their maxima, and lists of those worth a look; top-k, found among them.

Tiles are two-dimensional: [groups, GROUP]. A list is rising, so that ids rise along a tile, and from tile to tile.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from common.ops.sampling.gumbel_triton import noise_words
from common.ops.sampling.sample_triton import order_keys

GROUP = 256

_GROUP = tl.constexpr(GROUP)
_ALL = tl.constexpr(2**31 - 1)
_NOWHERE = tl.constexpr(2**30 // GROUP)  # a group beyond any vocabulary


@triton.jit
def tile_of(row, vocab, heat, groups, TILE: tl.constexpr):
    """Ids and tempered logits of the tokens of some groups: [TILE / GROUP, GROUP] each, -inf beyond the vocabulary."""
    tokens = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    x = tl.load(row + tokens, mask=tokens < vocab, other=-float("inf")).to(tl.float32)
    return tokens, tl.math.div_rn(x, heat)


@triton.jit
def listed(shortlist, count, at, TILE: tl.constexpr):
    """Groups `at` to `at` + TILE / GROUP of the shortlist."""
    places = at + tl.arange(0, TILE // _GROUP)
    return tl.load(shortlist + places, mask=places < count, other=_NOWHERE)


@triton.jit
def list_groups(shortlist, keys, key):
    """Lists the groups, rising, whose highest key is at least `key`; how many there are."""
    reaching = (keys >= key).to(tl.int32)
    tl.debug_barrier()  # all have read the shortlist before
    tl.store(shortlist + tl.cumsum(reaching, 0) - 1, tl.arange(0, keys.shape[0]), mask=reaching > 0)
    tl.debug_barrier()
    return tl.sum(reaching, 0)


@triton.jit
def words_of(seed, position, groups, TILE: tl.constexpr):
    quads = groups[:, None] * (_GROUP // 4) + tl.arange(0, _GROUP // 4)[None, :]
    return tl.reshape(noise_words(seed, position, quads), [TILE // _GROUP, _GROUP])


@triton.jit
def kth_highest(keys, k, low, high):
    """The highest key in [low, high] that `k` of `keys` reach, or `low`."""
    below = low.to(tl.int64)
    above = high.to(tl.int64)
    while below < above:
        middle = (below + above + 1) >> 1
        if tl.sum((keys >= middle).to(tl.int32), 0) >= k:
            below = middle
        else:
            above = middle - 1
    return below.to(tl.int32)


@triton.jit
def top_k_place(row, vocab, heat, shortlist, count, key, k, TILE: tl.constexpr):
    """Key and last token of the first `k` tokens of those whose key is at least `key`."""
    bins = tl.arange(0, 256)
    last = tl.full((), _ALL, tl.int32)
    found = tl.full((), 0, tl.int32)  # the digits so far, of the key with its sign bit turned
    known = tl.full((), 0, tl.int32)  # a mask of them
    equal = tl.full((), 0, tl.int32)
    shift = 24
    while shift >= 0:
        counts = tl.zeros([256], tl.int32)
        for at in range(0, count, TILE // _GROUP):
            _, x = tile_of(row, vocab, heat, listed(shortlist, count, at, TILE), TILE)
            keys = tl.reshape(order_keys(x), [TILE])
            turned = keys ^ -2147483648
            mask = (keys >= key) & ((turned & known) == found)
            counts += tl.histogram((turned >> shift) & 255, 256, mask=mask)
        total = tl.sum(counts, 0)
        if total <= k:
            shift = -1  # all of them
        else:
            upwards = total - tl.cumsum(counts, 0) + counts
            digit = tl.max(tl.where(upwards >= k, bins, -1), 0)
            k -= tl.sum(tl.where(bins > digit, counts, 0), 0)
            equal = tl.sum(tl.where(bins == digit, counts, 0), 0)
            found = found | (digit << shift)
            known = known | (255 << shift)
            shift -= 8
    key = tl.maximum(key, found ^ -2147483648)
    if equal > k:
        seen = tl.full((), 0, tl.int32)
        for at in range(0, count, TILE // _GROUP):
            tokens, x = tile_of(row, vocab, heat, listed(shortlist, count, at, TILE), TILE)
            ties = tl.reshape((order_keys(x) == key).to(tl.int32), [TILE])
            here = tl.sum(ties, 0)
            if (seen < k) & (seen + here >= k):
                ranks = seen + tl.cumsum(ties, 0)
                last = tl.min(tl.where((ties > 0) & (ranks == k), tl.reshape(tokens, [TILE]), _ALL), 0)
            seen += here
    return key, last


@triton.jit
def group_maxima_kernel(
    logits,
    rows,  # int32 [n]
    temperature,
    maxima,  # float32 [n, groups], tempered
    row_stride,
    vocab,
    groups,
    COMPACT: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(1)
    place = tl.load(rows + index)
    row = logits + (index if COMPACT else place).to(tl.int64) * row_stride
    numbers = tl.program_id(0) * (TILE // _GROUP) + tl.arange(0, TILE // _GROUP)
    tokens = numbers[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    x = tl.load(row + tokens, mask=tokens < vocab, other=-float("inf")).to(tl.float32)
    heat = tl.load(temperature + place)
    # division keeps the order
    highest = tl.math.div_rn(tl.max(x, 1), tl.where(heat == 0, 1.0, heat))
    tl.store(maxima + index * groups + numbers, highest, mask=numbers < groups)
