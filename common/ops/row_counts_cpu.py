"""Which numbers of rows a CPU's matrix kernel computes alike: found by running it, because no list of CPU flags says so.

oneDNN and MKL choose a kernel by the number of rows, the shape, the instruction set and the number of threads, and kernels that
add in another order give other bits. A kernel is run with n copies of one row for various n: those n belong together whose
results are equal in every bit, in every position, on one thread and on several. A batch is then computed in calls of such sizes
alone, so a row has the same bits in any batch: see docs/decisions/0003-batch-invariance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

SPOTS = (1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256)
"""Sizes that are tried: around the powers of two at which kernels change, and remainders of register tiles between them."""

_SMALL = 4
"""A class of row counts that begins here or below suits decoding, ..."""
_LARGE = 16
"""... and one that reaches so far does not make prompts slow."""

_ALIGNMENT = 64
"""Bytes: what torch gives to a new tensor. Some kernels choose by it, too."""

Multiply = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in_features] to [rows, out_features], a row from a row."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Sizes of calls that compute a row alike.

    sizes: ascending. dense: every size from the first to the last is one, otherwise only those named are. threads: on how many
    threads that holds; 1 where no size gives the bits of one thread on several.
    """

    sizes: tuple[int, ...]
    dense: bool
    threads: int


def measure(variants: Sequence[tuple[Multiply, torch.Tensor]], *, largest: int, threads: int) -> RowCounts:
    """variants: what each kernel computes, and a row [in_features] to try it with. largest: row counts up to here are tried.

    What one thread computes is the standard, so that processes with different numbers of threads agree.
    """
    spots = [count for count in SPOTS if count <= largest]
    with _threads(1):
        alone = {count: _bits(variants, count) for count in spots}
    classes: dict[bytes, list[int]] = {}
    for count, bits in alone.items():
        if bits is not None:
            classes.setdefault(bits, []).append(count)
    chosen = _choose(classes.values()) if classes else [1]
    if threads > 1:
        with _threads(threads):
            equal = [count for count in chosen if _bits(variants, count) == alone[count]]
        if not equal:
            threads = 1
        chosen = equal or chosen
    between = [count for count in spots if chosen[0] <= count <= chosen[-1]]
    return RowCounts(tuple(chosen), between == chosen, threads)


def agree(variants: Sequence[tuple[Multiply, torch.Tensor]], counts: Iterable[int], *, threads: int) -> bool:
    """Whether calls of all these sizes compute a row alike, on one thread and on `threads`."""
    found = set[bytes | None]()
    for number in {1, threads}:
        with _threads(number):
            found |= {_bits(variants, count) for count in counts}
    return len(found) == 1 and None not in found


def multiply_rows(x: torch.Tensor, multiply: Multiply, counts: RowCounts) -> torch.Tensor:
    """x: [rows, in_features]. Returns what `multiply` makes of it, in calls of sizes that agree."""
    if not x.is_contiguous() or x.data_ptr() % _ALIGNMENT:
        x = x.clone(memory_format=torch.contiguous_format)
    if counts.threads == 1 and torch.get_num_threads() > 1:
        with _threads(1):
            return _multiply_rows(x, multiply, counts)
    return _multiply_rows(x, multiply, counts)


def _multiply_rows(x: torch.Tensor, multiply: Multiply, counts: RowCounts) -> torch.Tensor:
    rows = x.shape[0]
    calls = list(split(rows, counts))
    if len(calls) == 1:
        return multiply(_padded(x, calls[0]))[:rows]
    parts, begin = list[torch.Tensor](), 0
    for size in calls:
        part = x[begin : begin + size]
        if part.data_ptr() % _ALIGNMENT:
            part = part.clone()
        parts.append(multiply(_padded(part, size))[: len(part)])
        begin += size
    return torch.cat(parts)


def split(rows: int, counts: RowCounts) -> Iterator[int]:
    """Sizes of calls that hold `rows` rows together; the last one may hold more.

    >>> list(split(70, RowCounts((2, 8, 32), True, 1))), list(split(70, RowCounts((2, 8, 32), False, 1)))
    ([32, 32, 6], [32, 32, 8])
    >>> list(split(1, RowCounts((2, 8, 32), True, 1))), list(split(20, RowCounts((2, 8, 32), False, 1)))
    ([2], [32])
    """
    sizes = counts.sizes
    while rows > sizes[-1]:
        yield sizes[-1]
        rows -= sizes[-1]
    if counts.dense:
        yield max(rows, sizes[0])
    else:
        yield next(size for size in sizes if size >= rows)


def _choose(classes: Iterable[list[int]]) -> list[int]:
    """The class of row counts to compute with. It follows from the classes alone, so that every process takes the same."""
    both = [members for members in classes if members[0] <= _SMALL and members[-1] >= _LARGE]
    return max(both or classes, key=lambda members: (members[-1], len(members)) if both else (len(members), -members[0]))


def _bits(variants: Sequence[tuple[Multiply, torch.Tensor]], count: int) -> bytes | None:
    """What `count` copies of a row give; None if that depends on where a copy stands."""
    found: list[bytes] = []
    for multiply, row in variants:
        result = multiply(row.expand(count, -1).contiguous())
        if not torch.equal(result, result[:1].expand_as(result)):
            return None
        found.append(result[0].contiguous().view(torch.uint8).numpy().tobytes())
    return b"".join(found)


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    return x if x.shape[0] >= size else F.pad(x, (0, 0, 0, size - x.shape[0]))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
