"""Which rows of a step the prompt kernel computes, and their attention in one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.ops.attention.form import AttentionForm, Reach
from common.ops.attention.prefix_kv import StepKv, gather_context
from common.ops.attention.prompt import Prompt, PromptTiles, attend_prompts, tile_prompts
from common.ops.attention.settings import AttentionSettings
from common.ops.attention.work_list import DeviceRow


class Continued(NamedTuple):
    """A row that goes on after keys of the pool, of which those from `begin` on are copied."""

    row: DeviceRow
    begin: int
    tiles: PromptTiles


@dataclass(slots=True, frozen=True)
class PromptPlan:
    """fresh: rows with nothing before them; None if there are none. num_tokens: of all rows."""

    fresh: PromptTiles | None
    continued: list[Continued]
    num_tokens: int


def plan_prompts(
    rows: Sequence[DeviceRow], settings: AttentionSettings, reach: Reach, block_tokens: int, device: torch.device
) -> tuple[PromptPlan, list[DeviceRow]]:
    """Return the plan and the rows that are not in it. reach: a window or nothing."""
    fresh = [row for row in rows if row.start == 0 and row.length >= settings.fresh_prefill_min]
    chunks = [row for row in rows if settings.suits_parts(row.length, row.start)]
    planned = {row.first for row in (*fresh, *chunks)}
    continued: list[Continued] = []
    for row in chunks:
        begin = reach.first_key(row.start) // block_tokens * block_tokens
        continued.append(Continued(row, begin, tile_prompts([Prompt(row.first, row.length, row.start - begin, 0)], device)))
    tiles = tile_prompts([Prompt(row.first, row.length, 0, row.first) for row in fresh], device) if fresh else None
    plan = PromptPlan(tiles, continued, sum(row.length for row in (*fresh, *chunks)))
    return plan, [row for row in rows if row.first not in planned]


def attend_planned(query: torch.Tensor, kv: StepKv, plan: PromptPlan, form: AttentionForm, output: torch.Tensor) -> None:
    """Write the rows of `plan`. query, output: [tokens, heads, head_dim], of the step."""
    if plan.fresh is not None:
        attend_prompts(query, kv.key, kv.value, plan.fresh, form, output)
    for row, begin, tiles in plan.continued:
        own = slice(row.first, row.first + row.length)
        key, value = gather_context(kv, row.first_block, begin, row.start, own, query.dtype)
        attend_prompts(query, key, value, tiles, form, output)
