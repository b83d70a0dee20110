"""By what number of query rows attention on a CPU goes, so that a query gets the same bits whatever queries come with it.

The kernel multiplies query rows with a tile of keys, and picks its way of adding up by their number. Rows are therefore padded
to a multiple for which all numbers agree on this CPU, found by running the kernel: see `row_counts_cpu`.
"""

from __future__ import annotations

from functools import cache

import torch

from common.ops.row_counts_cpu import agree

_MULTIPLES = (4, 8, 16, 32, 64)
_TRIED = (1, 2, 3, 4, 7, 8, 12, 16, 24, 25, 47, 48, 49, 63, 64, 191, 192, 193)
"""Multiples of 4 rows that are tried; the kernel takes other blocks from 192 and from 768 rows on."""

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(query, key, value, attn_mask=, scale=) [batch, heads, rows, head_dim] to that shape and log-sum-exps."""


class NotInvariant(RuntimeError):
    """A kernel of this CPU gives a row other bits in other batches, however it is called."""


@cache
def row_multiple(head_dim: int, tile_tokens: int, threads: int) -> int:
    """What to pad the number of query rows to a multiple of, for heads of this size and tiles of so many keys.

    :raises NotInvariant: if nothing helps.
    """
    made = torch.Generator().manual_seed(0)
    row = torch.randn(head_dim, generator=made)
    keys, values = (torch.randn(1, 1, tile_tokens, head_dim, generator=made) for _ in range(2))

    def attend(rows: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(1, 1, len(rows), tile_tokens)
        attended, sums = flash(rows[None, None], keys, values, attn_mask=mask, scale=0.125)
        return torch.cat((attended[0, 0], sums[0, 0, :, None]), 1)

    for multiple in _MULTIPLES:
        counts = sorted({-(-4 * count // multiple) * multiple for count in _TRIED})
        with torch.inference_mode():
            if agree([(attend, row)], counts, threads=threads):
                return multiple
    raise NotInvariant(f"attention over heads of {head_dim} depends on the batch on this CPU")
