"""Prompts that the kernel for Hopper computes: which rows of a step it takes, and what a layer's attention is then.

The interpreter does not run Gluon, so that the kernel's reference stands in for it here; `test_prompt_gpu` runs the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from common.ops import backend
from common.ops.attention.form import AttentionForm
from common.ops.attention.paged_attention import AttentionRow, paged_attention
from common.ops.attention.paged_reference import paged_attention_reference
from common.ops.attention.prompt import (
    Prompt,
    cut_prompts,
    takes_prompts,
)
from common.ops.attention.settings import AttentionSettings
from common.ops.attention.work import DevicePlan
from tests.ops.test_paged_attention_device import FP8, LAYER, LAYERS, Spans, make_batch, make_plan, make_pool, make_rows

SETTINGS = AttentionSettings(prefill_backend="hopper", fresh_prefill_min=20, chunk_min=24)
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64
SINKS = torch.linspace(-2.0, 3.0, HEADS)
FORMS = {
    "plain": AttentionForm(0.125),
    "window": AttentionForm(0.125, window=19),
    "sinks": AttentionForm(0.125, sinks=SINKS),
    "window and sinks": AttentionForm(0.125, window=33, sinks=SINKS),
}
SPANS: Spans = [(100, 1), (0, 24), (0, 33), (16, 40), (0, 5), (40, 23), (7, 24), (0, 150)]


@pytest.fixture(autouse=True)
def _on_the_interpreter() -> Iterator[None]:
    with backend.interpreted():
        yield


def planned(
    spans: Spans, pool: torch.Tensor, form: AttentionForm, settings: AttentionSettings = SETTINGS
) -> tuple[list[AttentionRow], int, DevicePlan]:
    rows = make_rows(pool, spans)
    num_tokens = sum(count for _, count in spans) + 3
    batch = make_batch(rows, num_tokens, known=True)
    plan = make_plan(batch, pool, HEADS, settings=settings, form=form, dtype=torch.bfloat16)
    return rows, num_tokens, plan


def step_kv(pool: torch.Tensor, rows: list[AttentionRow], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the step's tokens, as the pool has them; zeros for padding."""
    both = torch.zeros(2, num_tokens, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    for row in rows:
        held = pool[list(row.blocks), LAYER].transpose(0, 1).reshape(2, -1, KV_HEADS, HEAD_DIM)
        both[:, row.first : row.first + row.length] = held[:, row.start : row.start + row.length].to(torch.bfloat16)
    return both[0], both[1]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_a_step_of_prompts_prefixes_and_decoding_rows_is_attended_as_the_reference(
    form: AttentionForm, dtype: torch.dtype
) -> None:
    torch.manual_seed(5)
    pool = make_pool(60, KV_HEADS, HEAD_DIM, 16, torch.bfloat16).to(dtype)
    scales = torch.rand(LAYERS, 2, KV_HEADS) + 0.5 if dtype == FP8 else None
    rows, num_tokens, plan = planned(SPANS, pool, form)
    assert plan.prompts is not None
    assert plan.prompts.fresh is not None
    assert [prompt.length for prompt in plan.prompts.fresh.prompts] == [24, 33, 150]
    assert [continued.row.length for continued in plan.prompts.continued] == [40, 24]
    assert plan.listed_nowhere == 24 + 33 + 150 + 40 + 24
    held = pool if scales is None else (pool.float() * scales[None, :, :, None, :, None]).bfloat16()
    key, value = step_kv(held, rows, num_tokens)
    query = torch.randn(num_tokens, HEADS, HEAD_DIM).bfloat16()
    found = paged_attention(query, pool, LAYER, plan, form, key=key, value=value, kv_scale=scales)
    expected = paged_attention_reference(query, held, LAYER, rows, form)
    torch.testing.assert_close(found[:-3].float(), expected[:-3].float(), atol=0.03, rtol=0.03)


def test_a_prompt_after_a_window_copies_no_more_than_the_window() -> None:
    pool = make_pool(60, KV_HEADS, HEAD_DIM, 16, torch.bfloat16)
    _, _, plan = planned([(200, 40)], pool, FORMS["window"])
    assert plan.prompts is not None
    (continued,) = plan.prompts.continued
    assert continued.begin == 176, "key 182 is the first that token 200 sees, and a block begins at 176"
    assert continued.tiles.prompts == [Prompt(0, 40, 24, 0)]


def test_a_step_with_a_prefix_too_long_to_copy_leaves_prefixes_to_the_kernel_that_reads_pages() -> None:
    torch.manual_seed(6)
    pool = make_pool(60, KV_HEADS, HEAD_DIM, 16, torch.bfloat16)
    form, spans = FORMS["plain"], [(30, 30), (0, 40), (100, 25)]
    rows, num_tokens, plan = planned(spans, pool, form, replace(SETTINGS, max_prefix=64))
    assert plan.prompts is not None
    assert not plan.prompts.continued
    key, value = step_kv(pool, rows, num_tokens)
    query = torch.randn(num_tokens, HEADS, HEAD_DIM).bfloat16()
    found = paged_attention(query, pool, LAYER, plan, form, key=key, value=value)
    expected = paged_attention_reference(query, pool, LAYER, rows, form)
    torch.testing.assert_close(found[:-3].float(), expected[:-3].float(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize(
    ("form", "head_dim", "dtype"),
    [
        (AttentionForm(0.1, soft_cap=30.0), 64, torch.bfloat16),
        (AttentionForm(0.1, chunk=64), 64, torch.bfloat16),
        (AttentionForm(0.1), 80, torch.bfloat16),
        (AttentionForm(0.1), 64, torch.float32),
    ],
)
def test_what_the_kernel_does_not_compute_goes_to_the_one_that_reads_pages(
    form: AttentionForm, head_dim: int, dtype: torch.dtype
) -> None:
    assert not takes_prompts(head_dim, dtype, form.kind)
    pool = make_pool(20, KV_HEADS, head_dim, 16, dtype)
    batch = make_batch(make_rows(pool, [(0, 60)]), 60, known=True)
    plan = make_plan(batch, pool, HEADS, settings=SETTINGS, form=form)
    assert plan.prompts is None
    assert plan.prefill_backend == "kernel"
    assert plan.lists


def test_tiles_cover_each_prompt_once_and_the_longest_come_first() -> None:
    prompts = [Prompt(3, 300, 0, 3), Prompt(303, 1, 500, 900), Prompt(310, 128, 64, 0)]
    tiles = cut_prompts(prompts)
    for prompt in prompts:
        own = [tile for tile in tiles if prompt.first <= tile[0] < prompt.first + prompt.length]
        assert sorted(token for tile in own for token in range(tile[0], tile[0] + tile[1])) == list(
            range(prompt.first, prompt.first + prompt.length)
        )
        assert all(tile[2] == prompt.first_key and tile[3] == prompt.start + tile[0] - prompt.first for tile in own)
    keys = [position + queries for _, queries, _, position in tiles]
    assert keys == sorted(keys, reverse=True)
    assert max(tile[1] for tile in tiles) == 128
