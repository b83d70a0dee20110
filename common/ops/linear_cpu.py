"""`linear` on a CPU: oneDNN with a packed weight, twice as fast as torch's default, or that default where there is no packing.

Either adds up in an order that may depend on the number of rows. Which numbers agree on this CPU is measured when the first
weight of a shape is packed, and a batch is computed in calls of those sizes: see `row_counts_cpu`. The answer is kept on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from common.ops.linear_reference import linear_reference
from common.ops.row_counts_cpu import Multiply, RowCounts, measure, multiply_rows
from common.ops.tuning import Table

_PACK_HINT = 16

_LARGEST = ((1 << 22, 256), (1 << 25, 64))
"""Weights of at most so many numbers are tried with up to so many rows. Measuring a large one takes long, and few rows are
enough to make good use of each of its numbers."""
_LARGEST_OF_HUGE = 32


def _row_counts(sizes: Sequence[int], dense: bool, threads: int) -> RowCounts:
    return RowCounts(tuple(sizes), dense, threads)


TABLE = Table("linear-rows", _row_counts, [Path(__file__), Path(__file__).with_name("row_counts_cpu.py")])


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels of this dtype for this CPU."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out_features, in_features]. Returns oneDNN's packing of it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_HINT)


def row_counts(
    data: torch.Tensor, bias: torch.Tensor | None, *, packed: bool, in_features: int, out_features: int
) -> RowCounts:
    """Return the sizes of calls that `linear_cpu` may make, for weights of this shape and the number of threads set now.

    data: the weight, or its packing."""
    threads = torch.get_num_threads()
    if not TABLE.is_open:
        TABLE.open(torch.device("cpu"))
    kind = f"{'packed' if packed else 'plain'} {data.dtype}{'' if bias is None else ' biased'}"
    key = f"{kind} {out_features}x{in_features} {threads} threads"
    found = TABLE.get(key)
    if found is None:
        size = in_features * out_features
        largest = next((rows for most, rows in _LARGEST if size <= most), _LARGEST_OF_HUGE)
        with torch.inference_mode():
            found = measure(_variants(data, bias, in_features, packed), largest=largest, threads=threads)
        TABLE.put(key, found)
        with suppress(OSError):  # where no file can be kept, every start measures
            TABLE.save()
    return found


def linear_cpu(
    x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, counts: RowCounts, *, packed: bool
) -> torch.Tensor:
    """x: [rows, in_features]; data: the weight, or its packing. Returns [rows, out_features]."""
    return multiply_rows(x, _multiply(data, bias, packed), counts)


def _multiply(data: torch.Tensor, bias: torch.Tensor | None, packed: bool) -> Multiply:
    if packed:
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, data, bias, "none", [], "")
    return lambda x: linear_reference(x, data, bias)


def _variants(
    data: torch.Tensor, bias: torch.Tensor | None, in_features: int, packed: bool
) -> list[tuple[Multiply, torch.Tensor]]:
    """Return the linear itself, and for narrow dtypes one whose bias cancels the result: rounding to bfloat16 hides most
    differences of a float32 bit, but not in the small numbers that remain then."""
    row = torch.randn(in_features, generator=torch.Generator().manual_seed(0)).to(data.dtype)
    multiply = _multiply(data, bias, packed)
    if data.dtype == torch.float32:
        return [(multiply, row)]
    taken = multiply(row[None].expand(2, -1).contiguous())[0]
    if bias is not None:
        taken = taken - bias
    return [(multiply, row), (_multiply(data, -taken, packed), row)]
