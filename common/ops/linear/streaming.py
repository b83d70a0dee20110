"""Calls of the kernel for a few rows of weights of 4 bits in groups (`streaming_gluon.py`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from common.ops import backend
from common.ops.linear.candidates import Candidate, Op, Shape
from common.ops.linear.unpacking import CODES
from common.ops.linear.weight import LinearWeight
from common.ops.sizes import cdiv, next_power_of_2

_COLUMNS = 8
"""Activation rows of `mma.sync`."""
MOST_ROWS = 2 * _COLUMNS
"""Activation rows at most: a thread has no registers for more."""
MOST_BYTE_ROWS = 4
"""Of which each takes two columns."""
_SHARED_BYTES = 48 * 1024
"""That a kernel can declare."""
_ROWS = 16
"""Weight rows of a warp."""
_BYTE_STAGES = {64: 3, 128: 2}
_STAGES = {(64, 1): 3, (64, 2): 2, (128, 1): 1, (128, 2): 1}
"""Steps whose codes a warp asks for before it multiplies them, no more than there are registers for: with activations in bytes,
by the inputs that share a scale; in bf16, also by how many times eight activation rows there are. In a model one step of 256
inputs is faster than two in bf16, and two are faster in bytes."""
_REGISTERS = 128
"""Of a thread, so that `_AT_ONCE` warps fit on a multiprocessor: those of the usual shapes then run all at once."""
_AT_ONCE = 16
_FEWEST = 4
"""Warps for a multiprocessor: fewer ask for too little at once."""
_MOST_TURNS = 1.12
"""Of all warps' loops, times the fewest."""
_PARTS = (1, 2, 4, 8)
"""Warps of a program that may share a tile, each with a part of the inputs."""
_MOST_SPLITS = 8
"""Partial sums that the next kernel reads."""
_WARPS = 4
"""Of a program, at least."""


def takes_shape(shape: Shape) -> bool:
    """Can the kernel multiply bf16 activations by such a weight in groups?"""
    if shape.bits != 4 or shape.group not in _BYTE_STAGES or shape.activation_bytes != 2:
        return False
    return shape.k % (2 * shape.group) == 0 and shape.n % (2 * _ROWS) == 0


def streaming_candidates(shape: Shape, rows: int, num_sms: int) -> list[Candidate]:
    """Return what is worth a measurement for `rows`, a bucket."""
    if rows > MOST_ROWS or not takes_shape(shape):
        return []
    in_bytes = [replace(one, in_bytes=True) for one in _cut(shape, num_sms, _BYTE_STAGES[shape.group])]
    in_floats = _cut(shape, num_sms, _STAGES[shape.group, cdiv(rows, _COLUMNS)])
    return [one for one in in_bytes if _takes_bytes(shape, rows, one)] + in_floats


def _cut(shape: Shape, num_sms: int, stages: int) -> list[Candidate]:
    """Return the ways to share the inputs out; none where too few warps would run."""
    cuts = _cuts(shape, num_sms, stages)
    if _warps(shape, num_sms, cuts) < _FEWEST:
        return []
    return [
        Candidate("streaming", splits=splits, warps=max(_WARPS, parts), stages=stages, parts=parts)
        for parts, splits in _ways(shape, cuts)
    ]


def _takes_bytes(shape: Shape, rows: int, candidate: Candidate) -> bool:
    if not shape.integers or rows > MOST_BYTE_ROWS:
        return False
    held = _steps_each(shape.k // (2 * shape.group), candidate) * candidate.parts
    return _byte_memory(rows, held, shape.group) <= _SHARED_BYTES


def _steps_each(steps: int, candidate: Candidate) -> int:
    """Of a warp."""
    return cdiv(steps, candidate.splits * candidate.parts)


def _byte_memory(rows: int, steps: int, run: int) -> int:
    """Shared memory for activation rows of a program's steps: two bytes for each input, a unit and a sum for each run."""
    return rows * steps * 2 * (2 * run + 8)


def _cuts(shape: Shape, num_sms: int, stages: int) -> int:
    """Into how many pieces inputs are cut: no more than run at once, as many as do not add many turns to all warps' loops."""
    steps = shape.k // (2 * shape.group)
    at_once = min(int(_AT_ONCE / _warps(shape, num_sms, 1)), steps // stages)
    turns = {cuts: cuts * cdiv(cdiv(steps, cuts), stages) for cuts in range(1, at_once + 1) if _ways(shape, cuts)}
    return max((cuts for cuts in turns if turns[cuts] <= _MOST_TURNS * min(turns.values())), default=1)


def _ways(shape: Shape, cuts: int) -> list[tuple[int, int]]:
    """Parts, which a program adds up, and splits, which the next kernel does."""
    most = 1 if shape.op == "gated" else _MOST_SPLITS
    return [(parts, cuts // parts) for parts in _PARTS if cuts % parts == 0 and cuts // parts <= most]


def is_fastest(shape: Shape, num_sms: int) -> bool:
    """Is the kernel to be taken on Hopper without measuring others? In a model it was the fastest where its warps fit on the
    GPU at once and scales are of 128 inputs; alone, others seem as fast: they read ahead while kernels before them run."""
    return shape.group == 128 and _warps(shape, num_sms, 1) <= _AT_ONCE


def _warps(shape: Shape, num_sms: int, cuts: int) -> float:
    """For a multiprocessor."""
    return cdiv(shape.n, _ROWS) * cuts / num_sms


def linear_streaming(op: Op, x: torch.Tensor, weight: LinearWeight, chosen: Candidate) -> torch.Tensor:
    """x: bf16 [rows, in_features], up to 16 rows (4 in bytes), columns in the weight's order. Returns as `linear_dot` does."""
    from common.ops.linear.parts_triton import output_of, summed  # needs Triton, which choosing does not
    from common.ops.linear.streaming_gluon import streaming_kernel

    grouped = weight.grouped
    assert grouped is not None
    rows, depth = x.shape
    steps = len(grouped.data)
    each = _steps_each(steps, chosen)
    splits = cdiv(steps, each * chosen.parts)
    out = output_of(x, weight, op, splits=splits, partial=splits > 1)
    pdl = backend.pdl(x)
    byte_rows, held = (next_power_of_2(rows), each * chosen.parts) if chosen.in_bytes else (0, 0)
    shared = max(16, _byte_memory(byte_rows, held, grouped.run))
    tiles = cdiv(weight.out_features, _ROWS)
    streaming_kernel[(cdiv(tiles, chosen.warps // chosen.parts), splits)](
        x,
        grouped.data,
        grouped.scales,
        grouped.offsets,
        grouped.channel,
        weight.bias,
        out,
        rows,
        weight.out_features,
        depth,
        steps,
        each,
        RUN=grouped.run,
        CODE=CODES[grouped.code],
        GATED=op == "gated",
        WARPS=chosen.warps,
        PARTS=chosen.parts,
        STAGES=chosen.stages,
        TILES=cdiv(rows, _COLUMNS),
        ROWS=byte_rows,
        HELD=held,
        SHARED=f".shared .align 16 .b8 penstock_x[{shared}]; mov.u32 $0, penstock_x;",
        EARLY=op == "gated",
        PDL=pdl,
        num_warps=chosen.warps,
        maxnreg=_REGISTERS,
        launch_pdl=pdl,
    )
    return summed(out, weight, op)
