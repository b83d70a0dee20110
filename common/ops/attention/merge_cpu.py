"""Merges what a query got of each tile of keys by the tiles' log-sum-exps, first tile first (split-KV, FlashDecoding)."""

from __future__ import annotations

import torch


def merge_groups(
    tiled: torch.Tensor,
    sums: torch.Tensor,
    rows_with_tile: list[int],
    tile_rows: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """tiled: [tiles, kv_heads, query rows, head_dim]; sums: log-sum-exps [tiles, kv_heads, query rows]; sinks: float32
    [kv_heads, query rows], logits that have no value.

    Returns [rows, …]. Products and sums are separate operations, so that no machine fuses them on one path and not on
    another; the weights are rounded from float64, so that vector and scalar code agree.
    """
    top = sums[: rows_with_tile[0]].clone()
    begin = rows_with_tile[0]
    for count in rows_with_tile[1:]:
        torch.maximum(top[:count], sums[begin : begin + count], out=top[:count])
        begin += count
    weights = (sums - top.index_select(0, tile_rows)).double().exp_().float()
    weighted = tiled.mul_(weights[..., None])
    total, merged = weights[: rows_with_tile[0]], weighted[: rows_with_tile[0]]
    begin = rows_with_tile[0]
    for count in rows_with_tile[1:]:
        total[:count] += weights[begin : begin + count]
        merged[:count] += weighted[begin : begin + count]
        begin += count
    if sinks is not None:
        total = total + _sink_weights(sinks, top)
    return merged.div_(total[..., None])


def merge_tiles(parts: list[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor | None = None) -> torch.Tensor:
    """As `merge_groups`, for the tiles of one row: outputs [kv_heads, query rows, head_dim], log-sum-exps [kv_heads, rows]."""
    if len(parts) == 1:
        return parts[0][0] if sinks is None else add_sinks(*parts[0], sinks)
    sums = torch.stack([one for _, one in parts])
    top = sums.amax(0)
    weights = (sums - top).double().exp_().float()
    total, merged = weights[0].clone(), parts[0][0] * weights[0, ..., None]
    for (tiled, _), weight in zip(parts[1:], weights[1:], strict=True):
        total += weight
        merged += tiled * weight[..., None]
    if sinks is not None:
        total = total + _sink_weights(sinks, top)
    return merged.div_(total[..., None])


def add_sinks(attended: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """What keys of one tile gave, once sinks have their share of the softmax: the same bits as from a merge of several tiles
    of which a query sees one."""
    return attended / (1 + _sink_weights(sinks, sums))[..., None]


def _sink_weights(sinks: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    return (sinks - top).double().exp_().float()
