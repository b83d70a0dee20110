"""`paged_attention` on a CPU: causal attention of a ragged batch over paged, block-first KV.

A plan is made once per step and used by every layer. The keys are read in tiles of fixed length, counted from position 0, and
brought to float32, whatever the pool keeps; each (row, tile) pair is one entry of a batched attention call, and a row's tiles
are merged by their log-sum-exps, first tile first (split-KV, as in FlashDecoding). So ragged rows cost no padding beyond their
last tile, and what a query gets does not depend on other rows, on how its prompt was cut into chunks, or on whether it was part
of a prompt, a decode step or a verification: see docs/decisions/0003-batch-invariance.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from common.ops.attention.capped_cpu import capped_flash
from common.ops.attention.form import AttentionForm
from common.ops.attention.merge_cpu import add_sinks, merge_groups, merge_tiles
from common.ops.attention.plan_cpu import AttentionPlan, Decoding, Group, QueryTile
from common.ops.attention.rows_cpu import flash
from common.ops.attention.scratch_cpu import Gathered


class _Flash(Protocol):
    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, attn_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(slots=True, frozen=True)
class _Call:
    """One layer's attention: what `attend_cpu` was given, and the kernel for its form."""

    query: torch.Tensor
    pool: torch.Tensor
    layer: int
    plan: AttentionPlan
    form: AttentionForm
    flash: _Flash
    out: torch.Tensor

    def sinks(self, queries: int, num_rows: int) -> torch.Tensor | None:
        """Return the sinks of query rows, [kv_heads, num_rows]; 0 for padding."""
        if self.form.sinks is None:
            return None
        sinks = self.form.sinks.view(self.pool.shape[4], -1).repeat(1, queries)
        return F.pad(sinks, (0, num_rows - sinks.shape[1]))


def attend_cpu(query: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan, form: AttentionForm) -> torch.Tensor:
    """query: [tokens, heads, head_dim] in the pool's dtype. Returns the same shape; padding tokens get zeros.

    The step's own K and V must be in the pool.

    :raises ValueError: if `query` is not what the plan was made for, or the form's sinks don't fit.
    :raises NotInvariant: see `row_multiple`.
    """
    head_dim = pool.shape[5]
    if query.shape != (plan.num_tokens, plan.num_heads, head_dim) or query.dtype != pool.dtype:
        raise ValueError(
            f"the plan is for [{plan.num_tokens}, {plan.num_heads}, {head_dim}] {pool.dtype}, not {list(query.shape)}"
        )
    form.check(plan.num_heads, query.device)
    kernel = partial(capped_flash, soft_cap=form.soft_cap) if form.soft_cap else flash
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    call = _Call(query, pool, layer, plan, form, partial(kernel, scale=form.scale), out)
    planned = plan.planned(form)
    for group in planned.groups:
        if group.decoding is not None:
            _attend_decoding(call, group, group.decoding)
        else:
            _attend_group(call, group)
    for row in planned.long_rows:
        keys, values = _gather(call, row.entries, row.num_tiles)
        for tile in row.queries:
            _attend_tile(call, keys, values, tile)
    return out


def _gather(call: _Call, entries: torch.Tensor, num_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of tiles: [tiles, kv_heads, tile_tokens, head_dim] each, float32, in scratch memory."""
    _, _, _, block_tokens, kv_heads, head_dim = call.pool.shape
    flat = call.pool.view(-1, block_tokens * kv_heads * head_dim)
    found: list[torch.Tensor] = []
    for which, name in enumerate(("keys", "values")):
        buffers = Gathered.take(call.plan.scratch, name, len(entries), flat)
        buffers.fill(flat, entries + (2 * call.layer + which))
        found.append(buffers.wide.view(num_tiles, call.plan.tile_tokens, kv_heads, head_dim).transpose(1, 2))
    return found[0], found[1]


def _attend_group(call: _Call, group: Group) -> None:
    kv_heads, head_dim = call.pool.shape[4:]
    group_size = call.plan.num_heads // kv_heads
    rows, queries = group.num_rows, group.num_queries
    used, num_rows = queries * group_size, group.mask.shape[2]
    q = call.query[group.tokens].view(rows, queries, kv_heads, group_size, head_dim)
    q = q.transpose(1, 2).reshape(rows, kv_heads, used, head_dim).float()
    if num_rows > used:
        q = F.pad(q, (0, 0, 0, num_rows - used))
    keys, values = _gather(call, group.entries, group.mask.shape[0])
    merged = _attend_tiles(call, group, q, keys, values, call.sinks(queries, num_rows))
    merged = merged[:, :, :used].unflatten(2, (queries, group_size)).transpose(1, 2)
    if group.source is not None and group.target is not None:
        flat = merged.reshape(-1, *call.out.shape[1:]).index_select(0, group.source)
        call.out.index_copy_(0, group.target, flat.to(call.out.dtype))


def _attend_decoding(call: _Call, group: Group, decoding: Decoding) -> None:
    """What `_attend_group` computes, in fewer calls."""
    heads = decoding.heads
    heads.copy_(call.query[group.tokens].view(heads.shape))
    for which, gathered in enumerate(decoding.gathered):
        gathered.fill(decoding.pool, decoding.entries[2 * call.layer + which])
    sinks = call.sinks(1, group.mask.shape[2])
    merged = _attend_tiles(call, group, decoding.queries, decoding.keys, decoding.values, sinks)
    call.out[group.tokens].view(heads.shape).copy_(merged[:, :, : heads.shape[2]])


def _attend_tiles(
    call: _Call, group: Group, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """queries: [rows, kv_heads, query rows, head_dim]. Returns the same shape."""
    if group.tile_rows is None:
        merged, sums = call.flash(queries, keys, values, attn_mask=group.mask)
        return merged if sinks is None else add_sinks(merged, sums, sinks)
    tiled, sums = call.flash(queries.index_select(0, group.tile_rows), keys, values, attn_mask=group.mask)
    return merge_groups(tiled, sums, group.rows_with_tile, group.tile_rows, sinks)


def _attend_tile(call: _Call, keys: torch.Tensor, values: torch.Tensor, tile: QueryTile) -> None:
    kv_heads, head_dim = call.pool.shape[4:]
    count = tile.end - tile.begin
    used = count * (call.plan.num_heads // kv_heads)
    q = call.query[tile.begin : tile.end].float().view(count, kv_heads, -1, head_dim)
    q = q.transpose(0, 1).reshape(1, kv_heads, used, head_dim)
    if tile.num_rows > used:
        q = F.pad(q, (0, 0, 0, tile.num_rows - used))
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for begin, end, mask in tile.spans:
        tiled, sums = call.flash(q.expand(end - begin, -1, -1, -1), keys[begin:end], values[begin:end], attn_mask=mask)
        parts += zip(tiled.unbind(0), sums.unbind(0), strict=True)
    merged = merge_tiles(parts, call.sinks(count, tile.num_rows))[:, :used]
    call.out[tile.begin : tile.end].view(count, kv_heads, -1, head_dim).copy_(
        merged.view(kv_heads, count, -1, head_dim).transpose(0, 1)
    )
