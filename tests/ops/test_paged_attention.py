"""Paged attention equals its reference, and a query's result depends on that query alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.ops.attention.form import AttentionForm
from common.ops.attention.paged_attention import AttentionRow, paged_attention, plan_attention
from common.ops.attention.paged_reference import paged_attention_reference
from common.ops.kv.paged_kv import SlotMapping, clear_tails, write_kv
from common.ops.kv.paged_kv_reference import write_kv_reference

LAYERS, LAYER = 3, 1
SHAPES = [
    (9, 3, 64, 16),
    (4, 2, 16, 16),
    (4, 2, 32, 7),
    (8, 8, 32, 1),
    (8, 1, 64, 200),
]  # heads, KV heads, head dim, block tokens


def make_pool(
    num_blocks: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.randn(num_blocks, LAYERS, 2, block_tokens, kv_heads, head_dim).to(dtype)


def make_rows(pool: torch.Tensor, spans: list[tuple[int, int]]) -> list[AttentionRow]:
    """spans: (start, count) of each row; blocks are drawn at random without overlap."""
    block_tokens = pool.shape[3]
    free = torch.randperm(pool.shape[0]).tolist()
    rows: list[AttentionRow] = []
    first = 0
    for start, count in spans:
        needed = -(-(start + count) // block_tokens)
        rows.append(AttentionRow(first, count, start, [free.pop() for _ in range(needed)]))
        first += count
    return rows


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_tokens"), SHAPES)
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1)],
        [(0, 5)],
        [(127, 1), (128, 1), (5, 1)],
        [(300, 1), (0, 40), (126, 5), (37, 1), (200, 2), (90, 33)],
        [(0, 300)],
        [(250, 270), (511, 1)],
    ],
)
def test_equals_the_reference(
    heads: int, kv_heads: int, head_dim: int, block_tokens: int, spans: list[tuple[int, int]]
) -> None:
    torch.manual_seed(1)
    num_blocks = sum(-(-(start + count) // block_tokens) for start, count in spans)
    pool = make_pool(num_blocks + 2, kv_heads, head_dim, block_tokens)
    rows = make_rows(pool, spans)
    query = torch.randn(sum(count for _, count in spans) + 3, heads, head_dim)
    plan = plan_attention(pool, heads, rows, len(query))
    out = paged_attention(query, pool, LAYER, plan, AttentionForm(head_dim**-0.5))
    expected = paged_attention_reference(query, pool, LAYER, rows, AttentionForm(head_dim**-0.5))
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=3e-5)
    assert not out[-3:].any()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_tokens"), SHAPES)
def test_a_query_gets_the_same_bits_in_every_batch(
    heads: int, kv_heads: int, head_dim: int, block_tokens: int, threads: int
) -> None:
    torch.manual_seed(2)
    length = 300
    needed = -(-length // block_tokens)
    pool = make_pool(3 * needed, kv_heads, head_dim, block_tokens)
    blocks = torch.randperm(3 * needed).tolist()
    query = torch.randn(length, heads, head_dim)

    def attend(spans: list[tuple[int, int]], strangers: int = 0) -> torch.Tensor:
        """Positions of one sequence, cut into `spans`, each span a row of its own beside rows of another sequence."""
        others = [AttentionRow(i, 1, 37 * i % length, blocks[needed : 2 * needed]) for i in range(strangers)]
        parts = [query[start : start + count] for start, count in spans]
        firsts = itertools.accumulate((count for _, count in spans), initial=strangers)
        mine = [
            AttentionRow(first, count, start, blocks[:needed]) for (start, count), first in zip(spans, firsts, strict=False)
        ]
        flat = torch.cat([torch.randn(strangers, heads, head_dim), *parts])
        plan = plan_attention(pool, heads, others + mine, len(flat))
        return paged_attention(flat, pool, LAYER, plan, AttentionForm(0.1))[strangers:]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = attend([(0, length)])
        for size in (1, 3, 8, 33, 100, 128, 257):
            spans = [(start, min(size, length - start)) for start in range(0, length, size)]
            assert torch.equal(attend(spans), whole), size
        for span in ((0, 1), (127, 1), (128, 4), (255, 3), (299, 1), (60, 200)):
            assert torch.equal(attend([span], strangers=7), whole[span[0] : sum(span)]), span
    finally:
        torch.set_num_threads(before)


FORMS = {
    "window": AttentionForm(0.3, window=37),
    "window-of-one": AttentionForm(0.3, window=1),
    "chunk": AttentionForm(0.3, chunk=150),
    "window-and-chunk": AttentionForm(0.3, window=140, chunk=96),
    "cap": AttentionForm(0.3, soft_cap=2.0),
    "sinks": AttentionForm(0.3, sinks=torch.linspace(-60, 8, 6)),
    "all": AttentionForm(0.3, window=130, chunk=333, soft_cap=5.0, sinks=torch.linspace(4, -3, 6)),
}


def forget_unseen(pool: torch.Tensor, row: AttentionRow, form: AttentionForm, gone: int) -> AttentionRow:
    """As a cache that frees what fell out of a window: the row's first blocks are not its own, and hold no number."""
    pool[gone] = torch.nan
    unseen = form.first_key(row.start) // pool.shape[3]
    return row._replace(blocks=[gone] * unseen + list(row.blocks[unseen:]))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_equals_the_reference(name: str, head_dim: int) -> None:
    torch.manual_seed(6)
    form = replace(FORMS[name], scale=head_dim**-0.5)
    pool = make_pool(130, 2, head_dim, 16)
    spans = [(300, 1), (5, 1), (0, 40), (126, 5), (37, 1), (200, 2), (90, 33), (250, 270)]
    rows = [forget_unseen(pool, row, form, 129) for row in make_rows(pool[:129], spans)]
    query = torch.randn(sum(count for _, count in spans) + 3, 6, head_dim)
    plan = plan_attention(pool, 6, rows, len(query), reach=form.reach)
    out = paged_attention(query, pool, LAYER, plan, form)
    torch.testing.assert_close(out, paged_attention_reference(query, pool, LAYER, rows, form), atol=3e-6, rtol=3e-5)
    assert not out[-3:].any()


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_a_query_the_same_bits_in_every_batch(name: str) -> None:
    torch.manual_seed(7)
    form = FORMS[name]
    pool = make_pool(60, 2, 64, 16)
    query = torch.randn(300, 6, 64)
    blocks = torch.randperm(60).tolist()

    def attend(spans: list[tuple[int, int]], strangers: int) -> torch.Tensor:
        rows = [AttentionRow(i, 1, 97 * i % 300, blocks[20:]) for i in range(strangers)]
        for start, count in spans:
            rows.append(AttentionRow(rows[-1].first + rows[-1].length if rows else 0, count, start, blocks))
        flat = torch.cat([torch.randn(strangers, 6, 64), *(query[start : start + count] for start, count in spans)])
        return paged_attention(flat, pool, LAYER, plan_attention(pool, 6, rows, len(flat)), form)[strangers:]

    whole = attend([(0, 300)], 0)
    for size in (1, 3, 33, 128):
        assert torch.equal(attend([(start, min(size, 300 - start)) for start in range(0, 300, size)], 0), whole), size
    for start, count in ((127, 1), (128, 4), (299, 1), (60, 200)):
        assert torch.equal(attend([(start, count)], 5), whole[start : start + count]), (start, count)


def test_layers_of_several_forms_share_a_plan() -> None:
    torch.manual_seed(8)
    pool = make_pool(60, 2, 64, 16)
    rows = make_rows(pool, [(300, 1), (200, 1), (250, 1), (0, 40)])
    query = torch.randn(43, 6, 64)
    plan = plan_attention(pool, 6, rows, 43)
    for form in (*FORMS.values(), AttentionForm(0.1), *FORMS.values()):
        expected = paged_attention_reference(query, pool, LAYER, rows, form)
        torch.testing.assert_close(paged_attention(query, pool, LAYER, plan, form), expected, atol=3e-6, rtol=3e-5)


@pytest.mark.parametrize(
    "numbers", [{"scale": 0.0}, {"window": -1}, {"chunk": -1}, {"soft_cap": -1.0}, {"soft_cap": torch.nan}]
)
def test_an_impossible_form_is_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        AttentionForm(**({"scale": 1.0} | numbers))  # pyright: ignore[reportArgumentType]


def test_sinks_must_fit_the_heads() -> None:
    pool = make_pool(4, 2, 16, 16)
    plan = plan_attention(pool, 4, [AttentionRow(0, 1, 3, [0])], 1)
    for sinks in (torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="sinks are contiguous"):
            paged_attention(torch.randn(1, 4, 16), pool, LAYER, plan, AttentionForm(1.0, sinks=sinks))


def test_blocks_beyond_a_rows_end_are_never_seen() -> None:
    torch.manual_seed(3)
    pool = make_pool(4, 2, 16, 16)
    row = AttentionRow(0, 1, 20, [2, 0, 3])
    query = torch.randn(1, 4, 16)
    before = paged_attention(query, pool, LAYER, plan_attention(pool, 4, [row], 1), AttentionForm(0.25))
    clear_tails(pool, [(0, 5)])
    pool[1], pool[3] = torch.nan, torch.nan
    after = paged_attention(query, pool, LAYER, plan_attention(pool, 4, [row], 1), AttentionForm(0.25))
    assert torch.equal(before, after)


def test_bfloat16_is_close_and_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(4)
    pool = make_pool(40, 2, 64, 16, torch.bfloat16)
    rows = make_rows(pool, [(0, 60), (300, 1), (130, 3)])
    query = torch.randn(64, 4, 64).to(torch.bfloat16)
    out = paged_attention(query, pool, LAYER, plan_attention(pool, 4, rows, 64), AttentionForm(0.125))
    expected = paged_attention_reference(query, pool, LAYER, rows, AttentionForm(0.125))
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    alone = paged_attention(query, pool, LAYER, plan_attention(pool, 4, [rows[1]], 64), AttentionForm(0.125))
    assert torch.equal(alone[60], out[60])


def test_kv_lands_where_the_blocks_say() -> None:
    torch.manual_seed(5)
    pool = torch.zeros(6, LAYERS, 2, 4, 2, 8)
    expected = pool.clone()
    key, value = torch.randn(2, 7, 2, 8)
    blocks, offsets = [5, 5, 0, 3, 3], [2, 3, 0, 1, 2]
    write_kv(pool, LAYER, key, value, SlotMapping(pool, np.array(blocks), np.array(offsets)))  # two padding tokens
    write_kv_reference(expected, LAYER, key[:5], value[:5], blocks, offsets)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (AttentionRow(0, 0, 3, [0]), "don't hold"),
        (AttentionRow(0, 2, 15, [0]), "don't hold"),
        (AttentionRow(0, 1, 0, [9]), "don't exist"),
        (AttentionRow(0, 1, 0, [-1]), "don't exist"),
        (AttentionRow(4, 1, 0, [0]), "don't exist"),
    ],
)
def test_an_impossible_row_is_refused(row: AttentionRow, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_attention(make_pool(4, 2, 16, 16), 4, [row], 4)
