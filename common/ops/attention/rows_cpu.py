"""By what number of query rows attention on a CPU goes, so that a query gets the same bits whatever queries come with it.

Torch's kernel multiplies query rows with a tile of keys, through libraries that choose their way of adding up by the number of
rows, the instruction set and the number of threads. No list of CPU flags says which numbers agree, so it is measured: copies of
one row must get the same bits, in every position, in calls of various sizes, on one thread and on several. Rows are then padded
to the smallest multiple for which they do: see docs/decisions/0003-batch-invariance.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch

from common.ops.attention.capped_cpu import capped_flash

_MULTIPLES = (4, 8, 16, 32, 64)
_TRIED_ROWS = (4, 8, 12, 16, 28, 32, 48, 64, 96, 100, 188, 192, 196, 252, 256, 764, 768, 772)
"""Sizes of calls; the kernel takes other blocks of rows from 192 and from 768 on."""

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(query, key, value, attn_mask=, scale=) [batch, heads, rows, head_dim] to that shape and log-sum-exps."""


class NotInvariant(RuntimeError):
    """This CPU's kernel gives a query other bits in other batches, however many rows it is given."""


@cache
def row_multiple(head_dim: int, tile_tokens: int, threads: int, *, is_capped: bool = False) -> int:
    """Return what the number of query rows is to be a multiple of, for heads of this size and tiles of so many keys.

    is_capped: whether `capped_flash` computes it.

    :raises NotInvariant: if no multiple helps.
    """
    made = torch.Generator().manual_seed(0)
    row = torch.randn(head_dim, generator=made)
    keys, values = (torch.randn(1, 1, tile_tokens, head_dim, generator=made) for _ in range(2))
    kernel = partial(capped_flash, soft_cap=30.0) if is_capped else flash
    tiles = (1, 3) if is_capped else (1,)  # torch's matrix products know how many they are; its flash attention doesn't

    def bits(rows: int, tiles: int) -> bytes | None:
        """What each of `rows` copies gets in each tile; None if that depends on where it stands."""
        mask = torch.zeros(1, 1, rows, tile_tokens)
        queries = row.expand(tiles, 1, rows, -1).contiguous()
        tiled = (x.expand(tiles, -1, -1, -1) for x in (keys, values))
        attended, sums = kernel(queries, *tiled, attn_mask=mask, scale=0.125)
        result = torch.cat((attended, sums[..., None]), -1).flatten(0, 2)
        return result[0].numpy().tobytes() if torch.equal(result, result[:1].expand_as(result)) else None

    for multiple in _MULTIPLES:
        sizes = sorted({-(-rows // multiple) * multiple for rows in _TRIED_ROWS})
        found = set[bytes | None]()
        with torch.inference_mode():
            for number in {1, threads}:
                with _threads(number):
                    found |= {bits(size, count) for size in sizes for count in tiles}
        if len(found) == 1 and None not in found:
            return multiple
    raise NotInvariant(f"attention over heads of {head_dim} depends on the batch on this CPU")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
