"""Drawing tokens on a GPU: those that `sample_tokens` draws from equal logits, bit for bit, and no waiting for the device.

A step copies one pinned `HostDraws` to its `DrawBatch`, whose addresses stay, runs `sample_plain` for all rows (in the CUDA
graph: greedy, temperature, min-p), and afterwards `sample_filtered` for the rows with top-k or top-p, if any. Rows with
penalties, biases or minimum lengths are adjusted in copies (`common.ops.sampling.adjust_device`), and drawn from those by
`sample_filtered` too, filters or not.

What could differ from a CPU: a token's noise is -log(-log(u)) in double precision, rounded to float32; where the last bits of
a GPU's logarithm and of numpy's differ, the rounded noise differs for one token in 2^28 or so, and the draw only if that token
is within one float32 rounding of another. Everything else is integers and single IEEE roundings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from common.ops.backend import on_device
from common.ops.sampling.philox import MASK32
from common.ops.sampling.sample import GREEDY_BELOW, Draw

_FIELDS = (
    ("seed", torch.int64),
    ("position", torch.int64),
    ("top_p", torch.float64),
    ("temperature", torch.float32),
    ("first_temperature", torch.float32),
    ("log_min_p", torch.float32),
    ("top_k", torch.int32),
)
_ROW_BYTES = sum(dtype.itemsize for _, dtype in _FIELDS)
_MASK64 = (1 << 64) - 1
_MOST = (1 << 31) - 1


@dataclass(frozen=True)
class DrawBatch:
    """How rows are drawn, on the device. `buffer`: uint8; the rest, [rows] each, are views of it.

    Greedy rows have temperature 0. top_k: int32, 0 is off; top_p: float64, 1 is off; log_min_p: float32, -inf is off; seed and
    position (of the token drawn): int64; temperature: float32; first_temperature: the same, or 0 for rows that are drawn once
    more anyway, whose first draw need not pay for noise.
    """

    buffer: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    top_p: torch.Tensor
    temperature: torch.Tensor
    first_temperature: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor

    @classmethod
    def create(cls, rows: int, device: torch.device | str) -> DrawBatch:
        """All rows greedy."""
        return cls._over(torch.zeros(_padded(rows) * _ROW_BYTES, dtype=torch.uint8, device=device), rows)

    @classmethod
    def _over(cls, buffer: torch.Tensor, rows: int) -> DrawBatch:
        views: dict[str, torch.Tensor] = {}
        start = 0
        for name, dtype in _FIELDS:
            end = start + _padded(rows) * dtype.itemsize
            views[name] = buffer[start:end].view(dtype)[:rows]
            start = end
        return cls(buffer=buffer, **views)

    @property
    def rows(self) -> int:
        return len(self.seed)

    def load(self, draws: HostDraws) -> None:
        """Starts the copy from pinned memory, which must stay as it is until the copy has happened.

        :raises ValueError: for another number of rows.
        """
        if draws.rows != self.rows:
            raise ValueError(f"draws of {draws.rows} rows don't fit {self.rows}")
        self.buffer.copy_(draws.buffer, non_blocking=True)


class HostDraws:
    """The same in pinned memory; fields are numpy views. A runner has one for each step that may be under way.

    Between steps, as a rule, only positions change: `copy_from` the last step's, then `position[:n] += 1`.
    """

    def __init__(self, rows: int) -> None:
        """All rows greedy. Pinned if there is a CUDA device."""
        self.rows = rows
        self.buffer = torch.zeros(_padded(rows) * _ROW_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        views = DrawBatch._over(self.buffer, rows)
        self.seed: NDArray[np.int64] = views.seed.numpy()
        self.position: NDArray[np.int64] = views.position.numpy()
        self.top_p: NDArray[np.float64] = views.top_p.numpy()
        self.temperature: NDArray[np.float32] = views.temperature.numpy()
        self.first_temperature: NDArray[np.float32] = views.first_temperature.numpy()
        self.log_min_p: NDArray[np.float32] = views.log_min_p.numpy()
        self.top_k: NDArray[np.int32] = views.top_k.numpy()
        self._bytes: NDArray[np.uint8] = self.buffer.numpy()

    def copy_from(self, other: HostDraws) -> None:
        """:raises ValueError: for another number of rows."""
        self._bytes[:] = other._bytes

    def filtered_rows(self, count: int) -> NDArray[np.int32]:
        """Those of the first `count` rows that `sample_filtered` must draw."""
        filters = (self.top_k[:count] > 0) | (self.top_p[:count] < 1)
        return np.flatnonzero(filters & (self.temperature[:count] > 0)).astype(np.int32)


def _padded(rows: int) -> int:
    return -(-rows // 16) * 16  # every field starts at a multiple of 16 bytes


def pack_draws(draws: Sequence[Draw], into: HostDraws) -> None:
    """Writes the first len(draws) rows; those after them become greedy. Rows with top-k or top-p are drawn twice.

    :raises ValueError: for more draws than rows, or a position outside [0, 2^32).
    """
    count = len(draws)
    if count > into.rows:
        raise ValueError(f"{count} draws don't fit {into.rows} rows")
    into.temperature[count:] = into.first_temperature[count:] = 0
    if not count:
        return
    temperature, top_k, top_p, min_p, seed, position = zip(*draws, strict=True)
    if min(position) < 0 or max(position) > MASK32:
        raise ValueError(f"positions {min(position)} to {max(position)} are not in [0, 2^32)")
    heat = np.array(temperature)
    into.temperature[:count] = np.where(heat < GREEDY_BELOW, 0, heat)
    into.top_k[:count] = np.clip(np.array(top_k), 0, _MOST)
    into.top_p[:count] = top_p
    into.log_min_p[:count] = -np.inf
    if any(min_p):
        into.log_min_p[:count] = [math.log(share) if share > 0 else -math.inf for share in min_p]
    into.seed.view(np.uint64)[:count] = [number & _MASK64 for number in seed]
    into.position[:count] = position
    into.first_temperature[:count] = into.temperature[:count]
    into.first_temperature[into.filtered_rows(count)] = 0


def sample_plain(
    logits: torch.Tensor,
    batch: DrawBatch,
    out: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
    compact: bool = False,
    first: bool = False,
    results: torch.Tensor | None = None,
) -> None:
    """Draws each row, or `rows` (int32 [n], on the device) alone, top-k and top-p ignored. Greedy rows pay for no noise; nor,
    the `first` time, do those that are drawn once more, whose tokens mean nothing until then.

    logits: float32, bfloat16 or float16 [rows, vocab], rows contiguous; at most `batch.rows` rows; or, `compact`, [n, vocab]:
    those of `rows` alone. out: int32 or int64 [rows] at least, gets the tokens, of NaN any token; others stay.
    results: int32 or int64 as `out`: gets the same, but -1 for a row with a logit that is not finite. Draws of `rows` leave -1
    as it is, so that the draw of all rows, which comes first, must have had `results`.
    masks: int32 [n, ceil(vocab / 32)] or wider, bit t % 32 of word t // 32 allows token t; as many as rows are drawn.

    :raises ValueError: if shapes or dtypes don't fit, or on a CPU (see `sample_tokens`).
    """
    _check(logits, batch, out)
    _check(logits, batch, out if results is None else results)
    _check_rows(logits, rows, compact)
    count = logits.shape[0] if rows is None else len(rows)
    if not compact and (logits.shape[0] > batch.rows or logits.shape[0] > len(out)):
        raise ValueError(f"{logits.shape[0]} rows don't fit {batch.rows} draws and {len(out)} tokens")
    if masks is not None and (masks.dtype != torch.int32 or masks.ndim != 2 or masks.shape[1] * 32 < logits.shape[1]):
        raise ValueError(f"masks are int32 [n, vocab / 32], not {masks.dtype} {list(masks.shape)}")
    if masks is not None and len(masks) != count:
        raise ValueError(f"{len(masks)} masks are not those of {count} rows")
    from common.ops.sampling.sample_triton import sample_plain_triton

    if count:
        sample_plain_triton(
            logits,
            temperature=batch.first_temperature if first else batch.temperature,
            log_min_p=batch.log_min_p,
            seed=batch.seed,
            position=batch.position,
            out=out,
            results=results,
            rows=rows,
            masks=masks,
            compact=compact,
        )


def sample_filtered(
    logits: torch.Tensor,
    rows: torch.Tensor,
    batch: DrawBatch,
    out: torch.Tensor,
    *,
    compact: bool = False,
    results: torch.Tensor | None = None,
) -> None:
    """Draws `rows` (int32 [n], on the device) with all their filters, if any, and writes `out[rows]`; other tokens stay.

    logits and results: as for `sample_plain`, or, `compact`, logits [n, vocab]: those of `rows` alone.

    :raises ValueError: if shapes or dtypes don't fit, or on a CPU (see `sample_tokens`).
    """
    _check(logits, batch, out)
    _check_rows(logits, rows, compact)
    from common.ops.sampling.filters_triton import sample_rows_triton

    if len(rows):
        sample_rows_triton(
            logits,
            rows,
            temperature=batch.temperature,
            top_k=batch.top_k,
            top_p=batch.top_p,
            log_min_p=batch.log_min_p,
            seed=batch.seed,
            position=batch.position,
            out=out,
            results=results,
            compact=compact,
        )


def _check(logits: torch.Tensor, batch: DrawBatch, out: torch.Tensor) -> None:
    if logits.ndim != 2 or not logits.shape[1] or not logits.dtype.is_floating_point or logits.stride(1) != 1:
        raise ValueError(f"tokens are drawn from logits [rows, vocab], not {logits.dtype} {list(logits.shape)}")
    if out.ndim != 1 or out.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"tokens are int32 or int64 [rows], not {out.dtype} {list(out.shape)}")
    if not on_device(logits) or logits.device != batch.buffer.device:
        raise ValueError(f"logits on {logits.device} are not drawn by a batch on {batch.buffer.device}")


def _check_rows(logits: torch.Tensor, rows: torch.Tensor | None, compact: bool) -> None:
    if rows is None:
        if compact:
            raise ValueError("compact logits are those of rows that are named")
    elif rows.ndim != 1 or rows.dtype != torch.int32 or (compact and len(rows) != logits.shape[0]):
        raise ValueError(f"rows are int32 [n], not {rows.dtype} {list(rows.shape)} for logits {list(logits.shape)}")
