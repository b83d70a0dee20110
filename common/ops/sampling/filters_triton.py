"""Drawing under top-k and top-p without a sort: maxima of groups, masses, then one program per row.

Every filter keeps a prefix of the order "highest first, equal ones by id", so a filter is a place in it: a key and the last
token of that key (`is_ahead`). A row's program lists the groups of 256 tokens that reach the place known so far, and looks at
those alone:

    min-p    its place is known from the highest logit
    top-k    the k-th highest of the groups' maxima is a bound; in what reaches it, the place is found by radix, 8 bits at once
    top-p    masses are summed, in all and of two bands below the top: a band that has enough is a bound
    draw     the noisiest token up to the place. With top-p, if less than the wanted mass is ahead of it, it is in the nucleus,
             and the best of more than the nucleus: the answer. Else it and all behind it are outside: once more, from there

A few draws at most, as a rule one (a rejection, as FlashInfer's, but with noise that is fixed: the token is the one that
filtering first would give).

All counts and masses are integers (`ops.sampling.nucleus`): the kernel must be launched without fusing products and sums.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops.sampling.groups_triton import (
    GROUP,
    group_maxima_kernel,
    kth_highest,
    list_groups,
    listed,
    tile_of,
    top_k_place,
    words_of,
)
from common.ops.sampling.gumbel_triton import exact_noise, rough_noise, slack
from common.ops.sampling.nucleus_triton import (
    filters_mass,
    listed_mass,
    mass_ahead,
    mass_parts_kernel,
    nucleus_bound,
    parts_mass,
)
from common.ops.sampling.sample_triton import floor_key, is_ahead, order_keys
from common.ops.sizes import cdiv, next_power_of_2

TILE = 2048
NUM_WARPS = 8
"""Tokens at once in a row's program, and its warps. Candidates: (1024, 4), (2048, 8), (4096, 16); more tokens spill."""

CHUNK = 2048
CHUNK_WARPS = 4
"""Tokens of a program of the two launches before it, and warps. Candidates: (2048, 4), (2048, 8), (4096, 4): others spill."""

_GROUP = tl.constexpr(GROUP)
_ALL = tl.constexpr(2**31 - 1)


@triton.jit
def noisiest(row, vocab, heat, shortlist, count, seed, position, key, last, TILE: tl.constexpr):
    """The token up to (key, last) with the highest exact score."""
    best = tl.full([TILE // _GROUP, _GROUP], -float("inf"), tl.float32)
    second = best
    ids = tl.full([TILE // _GROUP, _GROUP], _ALL, tl.int32)
    for at in range(0, count, TILE // _GROUP):
        groups = listed(shortlist, count, at, TILE)
        tokens, x = tile_of(row, vocab, heat, groups, TILE)
        rough = x + rough_noise(words_of(seed, position, groups, TILE))
        scores = tl.where(is_ahead(x, tokens, key, last), rough, -float("inf"))
        ids = tl.where(scores > best, tokens, ids)
        second = tl.maximum(second, tl.minimum(scores, best))
        best = tl.maximum(best, scores)
    lead = tl.max(best)
    token = tl.min(tl.where(best == lead, ids, _ALL))
    reach = lead - slack(lead)
    if tl.max(tl.where(ids == token, second, best)) >= reach:
        lead = tl.full((), -float("inf"), tl.float32)
        for at in range(0, count, TILE // _GROUP):
            groups = listed(shortlist, count, at, TILE)
            tokens, x = tile_of(row, vocab, heat, groups, TILE)
            words = words_of(seed, position, groups, TILE)
            contends = is_ahead(x, tokens, key, last) & (x + rough_noise(words) >= reach)
            if tl.max(contends.to(tl.int32)) > 0:
                scores = tl.where(contends, x + exact_noise(words), -float("inf"))
                high = tl.max(scores)
                if high > lead:
                    lead = high
                    token = tl.min(tl.where(scores == high, tokens, _ALL))
    return tl.minimum(token, vocab - 1)  # of NaN comes nonsense, but a token


@triton.jit
def sample_rows_kernel(
    logits,
    rows,  # int32 [n]
    maxima,
    lists,  # int32 [n, groups]: scratch
    parts,  # int64 [n, 3, tiles]: see `mass_parts_kernel`
    temperature,
    top_k,
    top_p,
    log_min_p,
    seed,
    position,
    out,
    results,  # as `out`, but for rows that hold -1; or None
    row_stride,
    vocab,
    groups,
    tiles,
    COMPACT: tl.constexpr,  # logits hold the n rows alone
    GROUPS: tl.constexpr,  # powers of two, at least `groups`
    TILES: tl.constexpr,  # and `tiles`
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    place = tl.load(rows + index)
    row = logits + (index if COMPACT else place).to(tl.int64) * row_stride
    shortlist = lists + index * groups
    heat = tl.load(temperature + place)
    greedy = heat == 0
    heat = tl.where(greedy, 1.0, heat)
    numbers = tl.arange(0, GROUPS)
    highest = tl.load(maxima + index * groups + numbers, mask=numbers < groups, other=-float("inf"))
    top = tl.max(highest, 0)
    if greedy | (tl.abs(top) == float("inf")):
        first = tl.min(tl.where(highest == top, numbers, GROUPS), 0)
        tokens = first * _GROUP + tl.arange(0, _GROUP)
        x = tl.load(row + tokens, mask=tokens < vocab, other=-float("inf")).to(tl.float32)
        token = tl.min(tl.where(tl.math.div_rn(x, heat) == top, tokens, vocab - 1), 0)
    else:
        draw_seed = tl.load(seed + place)
        draw_position = tl.load(position + place)
        k = tl.load(top_k + place)
        share = tl.load(top_p + place)
        key = floor_key(top + tl.load(log_min_p + place))
        last = tl.full((), _ALL, tl.int32)
        keys = order_keys(highest)
        if (k > 0) & (k < vocab):
            key = kth_highest(keys, k, key, order_keys(top))
            count = list_groups(shortlist, keys, key)
            key, last = top_k_place(row, vocab, heat, shortlist, count, key, k, TILE)
        count = list_groups(shortlist, keys, key)
        wanted = tl.full((), 0, tl.int64)
        if share < 1:
            if filters_mass(k, share, vocab):
                total, near, far = parts_mass(parts + index * 3 * tiles, tiles, TILES)
            else:
                total, near, far = listed_mass(row, vocab, heat, shortlist, count, top, key, last, TILE)
            wanted, key, last = nucleus_bound(total, near, far, top, key, last, share)
            count = list_groups(shortlist, keys, key)
        token = tl.full((), 0, tl.int32)
        searching = 1
        while searching > 0:
            token = noisiest(row, vocab, heat, shortlist, count, draw_seed, draw_position, key, last, TILE)
            searching = 0
            if share < 1:
                token_key = order_keys(tl.math.div_rn(tl.load(row + token).to(tl.float32), heat))
                outside = mass_ahead(row, vocab, heat, shortlist, count, top, token_key, token - 1, TILE) >= wanted
                # each round gets somewhere, so that there is a last one whatever the logits
                if outside & ((token_key > key) | ((token_key == key) & (token <= last))):
                    key = token_key
                    last = token - 1
                    count = list_groups(shortlist, keys, key)
                    searching = 1
    tl.store(out + place, token.to(out.dtype.element_ty))
    if results is not None:
        broken = tl.load(results + place) < 0
        tl.store(results + place, tl.where(broken, -1, token).to(results.dtype.element_ty))


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
    results: torch.Tensor | None = None,
    compact: bool,
    tile: int | None = None,
    num_warps: int | None = None,
) -> None:
    """As `sample_filtered`, shapes checked by it; tile: tokens at once, a multiple of `GROUP`."""
    tile = tile or TILE
    count, vocab = len(rows), logits.shape[1]
    groups, tiles = cdiv(vocab, GROUP), cdiv(vocab, CHUNK)
    maxima = torch.empty(count, groups, dtype=torch.float32, device=logits.device)
    lists = torch.empty(count, groups, dtype=torch.int32, device=logits.device)
    parts = torch.empty(count, 3, tiles, dtype=torch.int64, device=logits.device)
    shape = {"row_stride": logits.stride(0), "vocab": vocab, "groups": groups, "COMPACT": compact}
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "log_min_p": log_min_p}
    group_maxima_kernel[(tiles, count)](
        logits=logits, rows=rows, temperature=temperature, maxima=maxima, TILE=CHUNK, num_warps=CHUNK_WARPS, **shape
    )
    mass_parts_kernel[(tiles, count)](
        logits=logits,
        rows=rows,
        maxima=maxima,
        parts=parts,
        GROUPS=next_power_of_2(groups),
        TILE=CHUNK,
        num_warps=CHUNK_WARPS,
        enable_fp_fusion=False,
        **filters,
        **shape,
    )
    sample_rows_kernel[(count,)](
        logits=logits,
        rows=rows,
        maxima=maxima,
        lists=lists,
        parts=parts,
        seed=seed,
        position=position,
        out=out,
        results=results,
        tiles=tiles,
        GROUPS=next_power_of_2(groups),
        TILES=next_power_of_2(tiles),
        TILE=tile,
        num_warps=num_warps or NUM_WARPS,
        enable_fp_fusion=False,
        **filters,
        **shape,
    )
