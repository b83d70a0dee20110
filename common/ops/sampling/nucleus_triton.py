"""Masses for top-p on a device: in one launch for all rows where top-k is off, over a list of groups where it is on."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from common.ops.sampling import nucleus
from common.ops.sampling.groups_triton import GROUP, listed, tile_of
from common.ops.sampling.sample_triton import floor_key, is_ahead, order_keys

_GROUP = tl.constexpr(GROUP)
_ALL = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(nucleus.LOWEST)
_LOG2E = tl.constexpr(nucleus.LOG2E)
_LN2_HIGH, _LN2_LOW = tl.constexpr(nucleus.LN2_HIGH), tl.constexpr(nucleus.LN2_LOW)
_P0, _P1, _P2, _P3, _P4, _P5 = (tl.constexpr(coefficient) for coefficient in nucleus.COEFFICIENTS)
_MASS = tl.constexpr(2.0**nucleus.MASS_BITS)
_NEAR = tl.constexpr(3.0)
_FAR = tl.constexpr(8.0)
"""The bands below the top. Candidates: (2, 6), (3, 8), (4, 10)."""


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
def filters_mass(k, top_p, vocab):
    """Whether the masses of a row are those of all its tokens (above min-p)."""
    return (top_p < 1) & ((k <= 0) | (k >= vocab))


@triton.jit
def mass_parts_kernel(
    logits,
    rows,  # int32 [n]
    maxima,  # float32 [n, groups], tempered
    parts,  # int64 [n, 3, tiles]: masses of all tokens above min-p, and of those in the bands
    temperature,
    top_k,
    top_p,
    log_min_p,
    row_stride,
    vocab,
    groups,
    COMPACT: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two, at least `groups`
    TILE: tl.constexpr,
):
    index = tl.program_id(1)
    place = tl.load(rows + index)
    heat = tl.load(temperature + place)
    wanted = filters_mass(tl.load(top_k + place), tl.load(top_p + place), vocab) & (heat != 0)
    if wanted:
        numbers = tl.arange(0, GROUPS)
        highest = tl.load(maxima + index * groups + numbers, mask=numbers < groups, other=-float("inf"))
        top = tl.max(highest, 0)
        if tl.abs(top) < float("inf"):
            row = logits + (index if COMPACT else place).to(tl.int64) * row_stride
            tile = tl.program_id(0)
            _, x = tile_of(row, vocab, heat, tile * (TILE // _GROUP) + tl.arange(0, TILE // _GROUP), TILE)
            key = floor_key(top + tl.load(log_min_p + place))
            mass = tl.where(order_keys(x) >= key, masses(x, top), 0)
            part = parts + index * 3 * tl.num_programs(0) + tile
            tl.store(part, tl.sum(mass))
            tl.store(part + tl.num_programs(0), tl.sum(tl.where(x >= top - _NEAR, mass, 0)))
            tl.store(part + 2 * tl.num_programs(0), tl.sum(tl.where(x >= top - _FAR, mass, 0)))


@triton.jit
def parts_mass(parts, tiles, TILES: tl.constexpr):
    """Masses of a row: in all, and in the bands."""
    numbers = tl.arange(0, TILES)
    total = tl.load(parts + numbers, mask=numbers < tiles, other=0)
    near = tl.load(parts + tiles + numbers, mask=numbers < tiles, other=0)
    far = tl.load(parts + 2 * tiles + numbers, mask=numbers < tiles, other=0)
    return tl.sum(total, 0), tl.sum(near, 0), tl.sum(far, 0)


@triton.jit
def listed_mass(row, vocab, heat, shortlist, count, top, key, last, TILE: tl.constexpr):
    """The same, of the tokens up to (key, last), which are in the list."""
    total = tl.full((), 0, tl.int64)
    near = tl.full((), 0, tl.int64)
    far = tl.full((), 0, tl.int64)
    for at in range(0, count, TILE // _GROUP):
        tokens, x = tile_of(row, vocab, heat, listed(shortlist, count, at, TILE), TILE)
        mass = tl.where(is_ahead(x, tokens, key, last), masses(x, top), 0)
        total += tl.sum(mass)
        near += tl.sum(tl.where(x >= top - _NEAR, mass, 0))
        far += tl.sum(tl.where(x >= top - _FAR, mass, 0))
    return total, near, far


@triton.jit
def nucleus_bound(total, near, far, top, key, last, top_p):
    """What the nucleus' sum of masses must reach, and a place behind the nucleus that is no later than (key, last)."""
    wanted = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
    bound = key
    if near >= wanted:
        bound = order_keys(top - _NEAR)
    elif far >= wanted:
        bound = order_keys(top - _FAR)
    if bound > key:
        key = bound
        last = tl.full((), _ALL, tl.int32)
    return wanted, key, last


@triton.jit
def mass_ahead(row, vocab, heat, shortlist, count, top, key, last, TILE: tl.constexpr):
    total = tl.zeros([TILE // _GROUP, _GROUP], tl.int64)
    for at in range(0, count, TILE // _GROUP):
        tokens, x = tile_of(row, vocab, heat, listed(shortlist, count, at, TILE), TILE)
        total += tl.where(is_ahead(x, tokens, key, last), masses(x, top), 0)
    return tl.sum(total)
