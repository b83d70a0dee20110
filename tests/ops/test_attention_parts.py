"""Attention of long pieces of prompts after long prefixes, in parts that are merged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from common.ops import backend
from common.ops.attention.configs import part_length
from common.ops.attention.form import AttentionForm
from common.ops.attention.paged_attention import paged_attention
from common.ops.attention.paged_reference import paged_attention_reference
from common.ops.attention.parts import merge_pair, merge_pair_reference, piece_sizes, planned_parts
from common.ops.attention.settings import DEFAULT_SETTINGS, AttentionSettings
from common.ops.attention.work import AttentionWorkspace, plan_device_attention
from tests.ops.test_paged_attention_device import (
    CPU,
    FP8,
    LAYER,
    LAYERS,
    close,
    make_batch,
    make_pool,
    make_rows,
    poison_unused,
)


@pytest.fixture(autouse=True)
def _on_the_interpreter() -> Iterator[None]:
    with backend.interpreted():
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_long_pieces_after_long_prefixes_go_in_parts(dtype: torch.dtype) -> None:
    """Here from 16 keys and 21 tokens on, in pieces of 16, 32 and 64 keys; rows of other kinds beside them."""
    torch.manual_seed(8)
    settings = AttentionSettings(fresh_prefill_min=20, long_prompt_min=21, part_min_prefix=16, min_piece=16, max_piece=64)
    kv_scale = torch.rand(LAYERS, 2, 2) + 0.5 if dtype == FP8 else None
    for spans, padding, parts in (
        ([(16, 21)], 0, 1),
        ([(250, 33)], 2, 1),
        ([(100, 1), (15, 40), (93, 30), (0, 24), (64, 22), (40, 20)], 3, 2),
        ([(100, 1), (300, 1), (9, 1), (93, 30), (0, 24), (64, 22)], 3, 2),
    ):
        pool = make_pool(90, 2, 32, 16, dtype)
        rows = make_rows(pool, spans)
        num_tokens = sum(count for _, count in spans) + padding
        query = torch.randn(num_tokens, 6, 32).bfloat16()
        plain = pool.float() * (1 if kv_scale is None else kv_scale[None, :, :, None, :, None])
        key, value = torch.full((2, num_tokens, 2, 32), torch.nan, dtype=torch.bfloat16)
        for row in rows:
            for which, tensor in enumerate((key, value)):
                held = plain[list(row.blocks), LAYER, which].reshape(-1, 2, 32)
                tensor[row.first : row.first + row.length] = held[row.start : row.start + row.length]
        poison_unused(pool, rows)
        workspace = AttentionWorkspace(CPU)
        batch = make_batch(rows, num_tokens, known=True)
        plan = plan_device_attention(batch, pool, 6, workspace, settings=settings, dtype=torch.bfloat16)
        assert [(run.start, run.length) for run in plan.chunks] == [span for span in spans if span[0] >= 16 and span[1] >= 21]
        assert len(plan.chunks) == parts
        out = paged_attention(query, pool, LAYER, plan, AttentionForm(0.2), key=key, value=value, kv_scale=kv_scale)
        close(out, paged_attention_reference(query.float(), plain, LAYER, rows, AttentionForm(0.2)).bfloat16())


def test_parts_come_in_few_sizes() -> None:
    settings = DEFAULT_SETTINGS
    longest = settings.max_piece
    for prefix in (1024, 5000, 16384, 65536, 131071):
        sizes = list(piece_sizes(prefix, settings))
        assert sizes == sorted(sizes, reverse=True) and sum(sizes) <= prefix < sum(sizes) + settings.min_piece
        assert all(size <= longest and size & (size - 1) == 0 for size in sizes)
    planned = list(planned_parts(2048, 131072, settings))
    assert [keys for _, keys, causal in planned if not causal] == [1024, 2048, 4096, 8192, 16384]
    assert [keys for _, keys, causal in planned if causal] == [2048, 2304, 2560, 2816, 3072]
    assert [keys for _, keys, causal in planned_parts(2048, 4096, settings) if not causal] == [1024, 2048, 4096]
    assert not list(planned_parts(1000, 131072, settings))
    # a worker's budget less the rows that decode, after any prefix: little more than it has to be
    squares = {keys for _, keys, causal in planned_parts(16384, 131072, settings) if causal}
    assert squares == {16384, 17408} == {part_length(16384 - 7 + rest, settings.min_piece) for rest in range(1024)}


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 3, 32), (37, 6, 80), (64, 4, 128)])
def test_two_parts_are_merged(tokens: int, heads: int, head_dim: int) -> None:
    """Views of longer tensors, as they come; the kernel, interpreted, beside the reference."""
    torch.manual_seed(12)
    parts = [
        (torch.randn(tokens + 5, heads, head_dim).bfloat16()[2:-3], 9 * torch.randn(heads, tokens + 5)[:, 2:-3])
        for _ in range(2)
    ]
    expected = merge_pair_reference(parts[0], parts[1], torch.float32)
    found = merge_pair(parts[0], parts[1], torch.float32)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert merge_pair(parts[0], parts[1], torch.bfloat16)[0].dtype == torch.bfloat16
