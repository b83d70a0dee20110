"""Drawing in two launches: the best of every chunk of the vocabulary, then the best of a row's chunks.

The first launch scores with rough noise, and keeps each chunk's two best. As a rule one token leads by more than the
roughness, and is the answer; else the second launch scores the chunks in question exactly (about one draw in a thousand).

A chunk does not know the row's highest logit, so it applies min-p with its own, which cuts no more than it should: if its best
token turns out to be cut after all, the chunk is one in question.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from common.ops import backend
from common.ops.sampling.gumbel_triton import exact_noise, noise_words, rough_noise, slack
from common.ops.sizes import cdiv, next_power_of_2

CHUNKS: tuple[tuple[int, int, int], ...] = ((8, 1024, 4), (64, 2048, 4), (1 << 30, 4096, 8))
"""Up to so many rows: tokens of a chunk, warps. Any choice draws the same tokens. Candidates: 8 or 16 tokens a thread, in
chunks of 1024 to 8192."""

EXACT_TOKENS = 512
"""Tokens scored exactly at once."""

_FLOOR = tl.constexpr(-2139095040)
"""The order key of the lowest finite float32."""
_ALL = tl.constexpr(2**31 - 1)


@triton.jit
def order_keys(x):
    """int32, ordered as the float32 values are; the zeros are equal."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def floor_key(lowest):
    """The key of `lowest`, or that of the lowest finite value if it is -inf."""
    return tl.maximum(order_keys(lowest), _FLOOR)


@triton.jit
def allowed_logits(row, mask, tokens, vocab):
    """A row's logits as float32; -inf beyond the vocabulary, and where `mask`, unless it is None, has no bit."""
    there = tokens < vocab
    x = tl.load(row + tokens, mask=there, other=-float("inf")).to(tl.float32)
    if mask is not None:
        bits = tl.load(mask + tokens // 32, mask=there, other=0)
        x = tl.where((bits >> (tokens % 32)) & 1 != 0, x, -float("inf"))
    return x


@triton.jit
def tempered(row, mask, first, vocab, temperature, TOKENS: tl.constexpr):
    """Token ids [first, first + TOKENS) and their logits / temperature; see `allowed_logits`."""
    tokens = first + tl.arange(0, TOKENS)
    return tokens, tl.math.div_rn(allowed_logits(row, mask, tokens, vocab), temperature)


@triton.jit
def chunk_words(seed, position, first, TOKENS: tl.constexpr):
    """Words of the noise of tokens [first, first + TOKENS); `first` is a multiple of four."""
    return tl.reshape(noise_words(seed, position, first // 4 + tl.arange(0, TOKENS // 4)), [TOKENS])


@triton.jit
def is_ahead(x, tokens, key, last):
    """Which tokens come before others in the order (highest first, equal ones by id) up to the token `last` of that key."""
    keys = order_keys(x)
    return (keys > key) | ((keys == key) & (tokens <= last))


@triton.jit
def exact_best(row, mask, first, end, vocab, temperature, seed, position, key, last, reach, best, winner, TOKENS: tl.constexpr):
    """`best` and `winner`, or the exact score and the id of a token in [first, end) that beats them.

    It is ahead of (key, last), see `is_ahead`. Tokens whose rough score is below `reach` can't win.
    """
    for start in range(first, end, TOKENS):
        tokens, x = tempered(row, mask, start, vocab, temperature, TOKENS)
        words = chunk_words(seed, position, start, TOKENS)
        contends = is_ahead(x, tokens, key, last) & (x + rough_noise(words) >= reach)
        if tl.max(contends.to(tl.int32), 0) > 0:
            scores = tl.where(contends, x + exact_noise(words), -float("inf"))
            high, place = tl.max(scores, 0, return_indices=True)
            if high > best:
                best = high
                winner = start + place
    return best, winner


@triton.jit
def chunks_kernel(
    logits,  # [rows, vocab]
    rows,  # int32 [n], which of them are drawn; None: all
    masks,  # int32 [n, words], bit t % 32 of word t // 32 allows token t; None: all tokens
    temperature,
    log_min_p,
    seed,
    position,
    peaks,  # float32 [4, rows, chunks]: highest logit; best rough score, the next, and the logit of the best
    ids,  # int32 [2, rows, chunks]: of the highest logit, of the best score; with CHECKED a third: is a logit not finite?
    row_stride,
    words,
    vocab,
    chunks,
    COMPACT: tl.constexpr,  # logits hold the n rows alone
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk = tl.program_id(0)
    index = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = index if rows is None else tl.load(rows + index)
    plane = tl.num_programs(1) * chunks
    slot = index * chunks + chunk
    first = chunk * BLOCK
    heat = tl.load(temperature + row)
    tokens = first + tl.arange(0, BLOCK)
    row_logits = logits + (index if COMPACT else row).to(tl.int64) * row_stride
    mask = None if masks is None else masks + index.to(tl.int64) * words
    x = allowed_logits(row_logits, mask, tokens, vocab)
    if CHECKED:
        broken = (tokens < vocab) & ~(tl.abs(x) < float("inf"))  # of NaN, too
        tl.store(ids + 2 * plane + slot, tl.max(broken.to(tl.int32), 0))
    if heat != 0:
        x = tl.math.div_rn(x, heat)
    peak, place = tl.max(x, 0, return_indices=True)
    tl.store(peaks + slot, peak)
    tl.store(ids + slot, first + place)
    if masks is not None:  # noqa: SIM102 - what is known when the kernel is compiled, then what is not
        if (heat != 0) & (peak == -float("inf")):  # nothing is allowed here: no noise is needed
            for plane_of in tl.static_range(1, 4):
                tl.store(peaks + plane_of * plane + slot, peak)
            tl.store(ids + plane + slot, first)
            heat = 0.0
    if heat != 0:
        noise = rough_noise(chunk_words(tl.load(seed + row), tl.load(position + row), first, BLOCK))
        scores = tl.where(x >= peak + tl.load(log_min_p + row), x + noise, -float("inf"))
        best, place = tl.max(scores, 0, return_indices=True)
        others = tokens != first + place
        tl.store(peaks + plane + slot, best)
        tl.store(peaks + 2 * plane + slot, tl.max(tl.where(others, scores, -float("inf")), 0))
        tl.store(peaks + 3 * plane + slot, tl.max(tl.where(others, -float("inf"), x), 0))
        tl.store(ids + plane + slot, first + place)


@triton.jit
def rows_kernel(
    logits,
    rows,
    masks,
    temperature,
    log_min_p,
    seed,
    position,
    peaks,
    ids,
    out,  # [rows]
    results,  # [rows] as `out`, -1 for rows with logits that are not finite; or None
    row_stride,
    words,
    vocab,
    chunks,
    COMPACT: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,  # power of two, at least `chunks`
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = index if rows is None else tl.load(rows + index)
    heat = tl.load(temperature + row)
    plane = tl.num_programs(0) * chunks
    numbers = tl.arange(0, CHUNKS)
    slots = index * chunks + numbers
    there = numbers < chunks
    peak = tl.load(peaks + slots, mask=there, other=-float("inf"))
    top, place = tl.max(peak, 0, return_indices=True)
    token = tl.load(ids + index * chunks + tl.minimum(place, chunks - 1))
    if (heat != 0) & (tl.abs(top) < float("inf")):
        lowest = top + tl.load(log_min_p + row)
        best = tl.load(peaks + plane + slots, mask=there, other=-float("inf"))
        second = tl.load(peaks + 2 * plane + slots, mask=there, other=-float("inf"))
        value = tl.load(peaks + 3 * plane + slots, mask=there, other=-float("inf"))
        certain = there & (value >= lowest)
        lead = tl.max(tl.where(certain, best, -float("inf")), 0)
        reach = lead - slack(lead)
        contends = there & (peak >= lowest) & (best >= reach)
        unclear = contends & ((second >= reach) | ~certain)
        left = tl.sum(contends.to(tl.int32), 0)
        place = tl.min(tl.where(contends, numbers, CHUNKS), 0)
        token = tl.load(ids + plane + index * chunks + tl.minimum(place, chunks - 1))
        if (left > 1) | (tl.max(unclear.to(tl.int32), 0) > 0):
            score = tl.full((), -float("inf"), tl.float32)
            while left > 0:
                score, token = exact_best(
                    logits + (index if COMPACT else row).to(tl.int64) * row_stride,
                    None if masks is None else masks + index.to(tl.int64) * words,
                    place * BLOCK,
                    tl.minimum(place * BLOCK + BLOCK, vocab),
                    vocab,
                    heat,
                    tl.load(seed + row),
                    tl.load(position + row),
                    floor_key(lowest),
                    _ALL,
                    reach,
                    score,
                    token,
                    TOKENS,
                )
                contends = contends & (numbers != place)
                place = tl.min(tl.where(contends, numbers, CHUNKS), 0)
                left -= 1
    token = tl.minimum(token, vocab - 1)  # of NaN comes nonsense, but a token
    tl.store(out + row, token.to(out.dtype.element_ty))
    if results is not None:
        if CHECKED:
            broken = tl.max(tl.load(ids + 2 * plane + slots, mask=there, other=0), 0) > 0
        else:
            broken = tl.load(results + row) < 0
        tl.store(results + row, tl.where(broken, -1, token).to(results.dtype.element_ty))


def sample_plain_triton(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    log_min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    results: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
    compact: bool = False,
    block: int | None = None,
) -> None:
    """As `sample_plain`, shapes checked by it; block: tokens of a chunk."""
    count, vocab = logits.shape[0] if rows is None else len(rows), logits.shape[1]
    warps = 4
    if block is None:
        block, warps = next((block, warps) for most, block, warps in CHUNKS if count <= most)
    chunks = cdiv(vocab, block)
    pdl = backend.pdl(logits) and rows is None and masks is None  # those are drawn behind a step's graph
    peaks = torch.empty(4, count, chunks, dtype=torch.float32, device=logits.device)
    checked = results is not None and rows is None
    ids = torch.empty(3 if checked else 2, count, chunks, dtype=torch.int32, device=logits.device)
    words = 0 if masks is None else masks.stride(0)
    chunks_kernel[(chunks, count)](
        logits=logits,
        rows=rows,
        masks=masks,
        temperature=temperature,
        log_min_p=log_min_p,
        seed=seed,
        position=position,
        peaks=peaks,
        ids=ids,
        row_stride=logits.stride(0),
        words=words,
        vocab=vocab,
        chunks=chunks,
        COMPACT=compact,
        CHECKED=checked,
        BLOCK=block,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    rows_kernel[(count,)](
        logits=logits,
        rows=rows,
        masks=masks,
        temperature=temperature,
        log_min_p=log_min_p,
        seed=seed,
        position=position,
        peaks=peaks,
        ids=ids,
        out=out,
        results=results,
        row_stride=logits.stride(0),
        words=words,
        vocab=vocab,
        chunks=chunks,
        COMPACT=compact,
        CHECKED=checked,
        BLOCK=block,
        CHUNKS=next_power_of_2(chunks),
        TOKENS=min(block, EXACT_TOKENS),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
