"""The kernel of prompts beside its reference, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from common.ops.attention.form import AttentionForm
from common.ops.attention.prompt import (
    Prompt,
    attend_prompts,
    attend_prompts_reference,
    prompts_are_right,
    tile_prompts,
)


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("window", [0, 1, 64, 100, 128, 1000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "sinks"), [(32, 8, 128, False), (64, 8, 64, True), (14, 2, 64, False), (7, 7, 128, True)]
)
def test_a_hopper_gpu_attends_to_prompts(heads: int, kv_heads: int, head_dim: int, sinks: bool, window: int) -> None:
    """Lengths around tiles and halves of them, with and without keys before; nothing else is written."""
    device = torch.device("cuda")
    logits = torch.linspace(-3.0, 4.0, heads, device=device) if sinks else None
    form = AttentionForm(head_dim**-0.5, window=window, sinks=logits)
    assert prompts_are_right(heads, kv_heads, head_dim, torch.bfloat16, device, form)
    torch.manual_seed(window)
    prompts: list[Prompt] = []
    first, row = 5, 0
    for length in (1, 63, 64, 65, 127, 128, 129, 300, 1000):
        for start in (0, 1, 64, 100, 127, 777):
            prompts.append(Prompt(first, length, start, row))
            first, row = first + length, row + start + length
    query = torch.randn(first + 30, heads, head_dim, device=device).bfloat16()
    key, value = torch.randn(2, row, kv_heads, head_dim, device=device).bfloat16()
    tiles = tile_prompts(prompts, device)
    found, expected = (torch.full_like(query, torch.nan) for _ in range(2))
    attend_prompts(query, key, value, tiles, form, found)
    attend_prompts_reference(query, key, value, tiles, form, expected)
    assert found[:5].isnan().all()
    assert found[first:].isnan().all()
    own = slice(5, first)
    error = (found[own].float() - expected[own].float()).norm() / expected[own].float().norm()
    assert error < 0.004
