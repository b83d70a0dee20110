"""Drawing under top-k and top-p without a sort: one program per row, which reads it (from L2, as a rule) a few times.

Every filter keeps a prefix of the order "highest first, equal ones by id", so a filter is a place in it: a key and the last
token of that key (`is_ahead`). Top-k finds its place by radix, eight bits at a time. Top-p does not look for one: it draws from
the prefix so far; a token with less than the wanted mass ahead of it is inside the nucleus, and being the best of more it is
the answer; any other, and all behind it, are outside, and the draw is repeated among those ahead. One to two rounds as a rule,
log(1 / p) on average for flat logits (a rejection as in FlashInfer, but with noise that is fixed, so the token is the one that
filtering first would give).

All counts and masses are integers (`common.ops.nucleus`): the kernel must be launched without fusing products and sums.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops import nucleus
from common.ops.gumbel_triton import noise_words, rough_noise, slack
from common.ops.sample_triton import exact_best, floor_key, is_ahead, order_keys, tempered

TILE = 4096
NUM_WARPS = 16
"""Tokens at once, and warps. Candidates: (2048, 8), (4096, 16), (8192, 32)."""

EXACT_TOKENS = 512

_ALL = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(nucleus.LOWEST)
_LOG2E = tl.constexpr(nucleus.LOG2E)
_LN2_HIGH, _LN2_LOW = tl.constexpr(nucleus.LN2_HIGH), tl.constexpr(nucleus.LN2_LOW)
_P0, _P1, _P2, _P3, _P4, _P5 = (tl.constexpr(coefficient) for coefficient in nucleus.COEFFICIENTS)
_MASS = tl.constexpr(2.0**nucleus.MASS_BITS)
_NEAR = tl.constexpr(3.0)
_FAR = tl.constexpr(8.0)
"""Distances from the top at which the nucleus may be bounded before noise is looked at. Candidates: (2, 6), (3, 8), (4, 10)."""


@triton.jit
def masses(x, top):
    """As `nucleus.masses`, in the same steps: int64."""
    distance = tl.maximum(x - top, _LOWEST)
    exponent = tl.floor(distance * _LOG2E + 0.5)
    distance = distance - exponent * _LN2_HIGH
    distance = distance - exponent * _LN2_LOW
    power = ((((distance * _P0 + _P1) * distance + _P2) * distance + _P3) * distance + _P4) * distance + _P5
    power = power * (distance * distance) + distance + 1.0
    bits = power.to(tl.int32, bitcast=True) + (exponent.to(tl.int32) << 23)
    return (bits.to(tl.float32, bitcast=True) * _MASS).to(tl.int64)


@triton.jit
def highest(row, vocab, temperature, TILE: tl.constexpr):
    """The highest tempered logit, and its lowest id."""
    best = tl.full([TILE], -float("inf"), tl.float32)
    ids = tl.arange(0, TILE)
    for start in range(0, vocab, TILE):
        tokens, x = tempered(row, start, vocab, temperature, TILE)
        ids = tl.where(x > best, tokens, ids)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, ids, _ALL), 0)


@triton.jit
def top_k_place(row, vocab, temperature, key, count, TILE: tl.constexpr):
    """Key and last token of the first `count` tokens of those whose key is at least `key`."""
    bins = tl.arange(0, 256)
    last = tl.full((), _ALL, tl.int32)
    found = tl.full((), 0, tl.int32)  # the digits so far, of the key with its sign bit turned
    known = tl.full((), 0, tl.int32)  # a mask of them
    equal = tl.full((), 0, tl.int32)
    shift = 24
    while shift >= 0:
        counts = tl.zeros([256], tl.int32)
        for start in range(0, vocab, TILE):
            _, x = tempered(row, start, vocab, temperature, TILE)
            keys = order_keys(x)
            turned = keys ^ -2147483648
            mask = (keys >= key) & ((turned & known) == found)
            counts += tl.histogram((turned >> shift) & 255, 256, mask=mask)
        total = tl.sum(counts, 0)
        if total <= count:
            shift = -1  # all of them
        else:
            upwards = total - tl.cumsum(counts, 0) + counts
            digit = tl.max(tl.where(upwards >= count, bins, -1), 0)
            count -= tl.sum(tl.where(bins > digit, counts, 0), 0)
            equal = tl.sum(tl.where(bins == digit, counts, 0), 0)
            found = found | (digit << shift)
            known = known | (255 << shift)
            shift -= 8
    key = tl.maximum(key, found ^ -2147483648)
    if equal > count:
        seen = tl.full((), 0, tl.int32)
        for start in range(0, vocab, TILE):
            tokens, x = tempered(row, start, vocab, temperature, TILE)
            ties = (order_keys(x) == key).to(tl.int32)
            here = tl.sum(ties, 0)
            if (seen < count) & (seen + here >= count):
                ranks = seen + tl.cumsum(ties, 0)
                last = tl.min(tl.where((ties > 0) & (ranks == count), tokens, _ALL), 0)
            seen += here
    return key, last


@triton.jit
def nucleus_mass(row, vocab, temperature, top, key, last, top_p, TILE: tl.constexpr):
    """What the nucleus' sum of masses must reach, and a place behind the nucleus that is no later than (key, last)."""
    total = tl.zeros([TILE], tl.int64)
    near = tl.zeros([TILE], tl.int64)
    far = tl.zeros([TILE], tl.int64)
    for start in range(0, vocab, TILE):
        tokens, x = tempered(row, start, vocab, temperature, TILE)
        mass = tl.where(is_ahead(x, tokens, key, last), masses(x, top), 0)
        total += mass
        far += tl.where(x >= top - _FAR, mass, 0)
        near += tl.where(x >= top - _NEAR, mass, 0)
    wanted = tl.maximum(tl.ceil(top_p * tl.sum(total, 0).to(tl.float64)).to(tl.int64), 1)
    if tl.sum(near, 0) >= wanted:
        bound = order_keys(top - _NEAR)
    elif tl.sum(far, 0) >= wanted:
        bound = order_keys(top - _FAR)
    else:
        bound = key
    if bound > key:
        key = bound
        last = tl.full((), _ALL, tl.int32)
    return wanted, key, last


@triton.jit
def mass_ahead(row, vocab, temperature, top, key, last, TILE: tl.constexpr):
    total = tl.zeros([TILE], tl.int64)
    for start in range(0, vocab, TILE):
        tokens, x = tempered(row, start, vocab, temperature, TILE)
        ahead = is_ahead(x, tokens, key, last)
        if tl.max(ahead.to(tl.int32), 0) > 0:
            total += tl.where(ahead, masses(x, top), 0)
    return tl.sum(total, 0)


@triton.jit
def noisiest(row, vocab, temperature, seed, position, key, last, TILE: tl.constexpr, TOKENS: tl.constexpr):
    """The token up to (key, last) with the highest exact score, and its key."""
    best = tl.full([TILE], -float("inf"), tl.float32)
    second = tl.full([TILE], -float("inf"), tl.float32)
    ids = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        tokens, x = tempered(row, start, vocab, temperature, TILE)
        ahead = is_ahead(x, tokens, key, last)
        if tl.max(ahead.to(tl.int32), 0) > 0:
            scores = tl.where(ahead, x + rough_noise(noise_words(seed, position, start, TILE)), -float("inf"))
            ids = tl.where(scores > best, tokens, ids)
            second = tl.maximum(second, tl.minimum(scores, best))
            best = tl.maximum(best, scores)
    lead, place = tl.max(best, 0, return_indices=True)
    lanes = tl.arange(0, TILE)
    token = tl.max(tl.where(lanes == place, ids, 0), 0)
    reach = lead - slack(lead)
    if tl.max(tl.where(lanes == place, second, tl.maximum(second, best)), 0) >= reach:
        none = tl.full((), -float("inf"), tl.float32)
        _, token = exact_best(row, 0, vocab, vocab, temperature, seed, position, key, last, reach, none, token, TOKENS)
    return token, order_keys(tl.math.div_rn(tl.load(row + token).to(tl.float32), temperature))


@triton.jit
def sample_rows_kernel(
    logits,
    rows,  # int32 [n]
    temperature,
    top_k,
    top_p,
    log_min_p,
    seed,
    position,
    out,
    row_stride,
    vocab,
    COMPACT: tl.constexpr,  # logits hold the n rows alone
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    index = tl.program_id(0)
    place = tl.load(rows + index)
    row = logits + (index if COMPACT else place).to(tl.int64) * row_stride
    heat = tl.load(temperature + place)
    greedy = heat == 0
    heat = tl.where(greedy, 1.0, heat)
    top, token = highest(row, vocab, heat, TILE)
    if (tl.abs(top) < float("inf")) & ~greedy:
        key = floor_key(top + tl.load(log_min_p + place))
        last = tl.full((), _ALL, tl.int32)
        draw_seed = tl.load(seed + place)
        draw_position = tl.load(position + place)
        count = tl.load(top_k + place)
        share = tl.load(top_p + place)
        if (count > 0) & (count < vocab):
            key, last = top_k_place(row, vocab, heat, key, count, TILE)
        wanted = tl.full((), 0, tl.int64)
        if share < 1:
            wanted, key, last = nucleus_mass(row, vocab, heat, top, key, last, share, TILE)
        searching = 1
        while searching > 0:
            token, token_key = noisiest(row, vocab, heat, draw_seed, draw_position, key, last, TILE, TOKENS)
            searching = 0
            if share < 1 and mass_ahead(row, vocab, heat, top, token_key, token - 1, TILE) >= wanted:
                key = token_key
                last = token - 1
                searching = 1
    tl.store(out + place, token.to(out.dtype.element_ty))


def sample_rows_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    compact: bool,
    tile: int | None = None,
    num_warps: int = NUM_WARPS,
) -> None:
    """As `sample_filtered`, shapes checked by it; tile: tokens at once."""
    tile = tile or TILE
    sample_rows_kernel[(rows.shape[0],)](
        logits=logits,
        rows=rows,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        log_min_p=log_min_p,
        seed=seed,
        position=position,
        out=out,
        row_stride=logits.stride(0),
        vocab=logits.shape[1],
        COMPACT=compact,
        TILE=tile,
        TOKENS=min(tile, EXACT_TOKENS),
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
