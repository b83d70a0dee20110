"""Calls of the kernel that unpacks 4-bit weights in warps of their own (`unpacking_gluon.py`), for Hopper and many rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from common.ops import backend
from common.ops.linear.candidates import SHARED_BYTES, Candidate, Op, Shape
from common.ops.linear.unpacking_sizes import BLOCK_N, STEP
from common.ops.linear.weight import LinearWeight
from common.ops.sizes import cdiv

_W_STAGES = {64: 4, 128: 4, 256: 4}
_X_STAGES = {64: 10, 128: 7, 256: 4}
"""By the activation rows of a tile: most steps in shared memory, of 16 KB of weights and of 8, 16 or 32 KB of activations."""
_UNPACKERS = {64: 2, 128: 2, 256: 1}
"""Warp groups. A product of 256 columns needs 154 registers, with which a program of four warp groups can't start."""
_AHEAD = {64: 3, 128: 2, 256: 2}
"""Chunks of codes in shared memory for each group of unpackers, each two steps."""
_BARRIERS = 1024
"""Bytes, with what aligns them."""
CODES = {"int4": 0, "fp4": 1, "nf4": 2}
"""CODE of the kernel."""


class Codes(NamedTuple):
    """The weight of a linear, or those of all experts: `values`, `scales`, `offsets` and `channel` as `GroupedWeight` or
    `PackedWeight` have them. exponents: scales are those of MXFP4 experts. n: weight rows of one expert."""

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    channel: torch.Tensor | None
    bias: torch.Tensor | None
    code: int
    exponents: bool
    run: int
    n: int

    @property
    def steps(self) -> int:
        """Of 64 inputs."""
        return self.values.shape[-3] * (2 * self.run // STEP)


class PairTiles(NamedTuple):
    """Which activation rows are whose. table: int32 [slots, 4], the `tiles` of `SortedPairs`. order, factors: the product with
    row i is multiplied by factors[order[i]]; None where it is not."""

    table: torch.Tensor
    order: torch.Tensor | None = None
    factors: torch.Tensor | None = None


class Gate(NamedTuple):
    """The activation of gate and up; the fields are those of `ExpertActivation`."""

    kind: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0


def takes_shape(shape: Shape) -> bool:
    """Can the kernel multiply bf16 activations by such a weight in groups?"""
    aligned = shape.k % 8 == 0  # rows of activations are multiples of 16 bytes
    return shape.bits == 4 and shape.group >= 32 and shape.activation_bytes == 2 and aligned


def unpacking_candidates(shape: Shape, rows: int, num_sms: int) -> list[Candidate]:
    """Return what is worth a measurement for `rows`, a bucket."""
    if rows < 64 or not takes_shape(shape):
        return []
    found: list[Candidate] = []
    for block_m in (64, 128, 256):
        if block_m > rows or (rows > 512 and block_m < 256):
            continue
        tiles = cdiv(shape.n, BLOCK_N) * cdiv(rows, block_m)
        steps = cdiv(shape.k, STEP)
        wanted = (
            {1} if shape.op == "gated" else {splits for splits in (1, 2, 3, 4, 6, 8) if _fills(tiles, splits, steps, num_sms)}
        )
        found += [Candidate("unpacking", False, BLOCK_N, block_m, STEP, splits, 12) for splits in sorted(wanted)]
    return found


def _fills(tiles: int, splits: int, steps: int, num_sms: int) -> bool:
    """Splits cost a pass over float32 sums: worth it where tiles alone leave multiprocessors idle."""
    return splits == 1 or (tiles * splits <= num_sms and steps // splits >= 8 and tiles * (splits + 1) > num_sms // 2)


def linear_unpacking(op: Op, x: torch.Tensor, weight: LinearWeight, chosen: Candidate) -> torch.Tensor:
    """x: bf16 [rows, in_features], columns in the weight's order. Returns as `linear_dot` does."""
    from common.ops.linear.parts_triton import output_of, summed  # needs Triton, which choosing does not

    grouped = weight.grouped
    assert grouped is not None
    codes = Codes(
        grouped.data, grouped.scales, grouped.offsets, grouped.channel, weight.bias, CODES[grouped.code], False, grouped.run,
        weight.out_features,
    )  # fmt: skip
    chunks = cdiv(codes.steps, 2)
    splits = cdiv(chunks, cdiv(chunks, chosen.splits))
    out = output_of(x, weight, op, splits=splits, partial=splits > 1)
    multiply_unpacking(x, codes, out, block_m=chosen.block_m, splits=splits, gate=Gate() if op == "gated" else None)
    return summed(out, weight, op)


def multiply_unpacking(
    x: torch.Tensor,
    codes: Codes,
    out: torch.Tensor,
    *,
    block_m: int,
    splits: int = 1,
    tiles: PairTiles | None = None,
    gate: Gate | None = None,
) -> None:
    """Write x · weightᵀ to `out`: [rows, n], or [rows, n / 2] with a gate, which is applied, or float32 [splits, rows, n].

    x: bf16 [rows, k], contiguous; with tiles in the order of experts. block_m: most rows of a tile, 64, 128 or 256.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from common.ops.linear.unpacking_gluon import unpacking_kernel

    rows, depth = x.shape
    slots = cdiv(rows, block_m) if tiles is None else len(tiles.table)
    box = [block_m, STEP]
    num_items = slots * cdiv(codes.n, BLOCK_N) * splits
    layout: Any = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    pdl = backend.pdl(x)
    unpacking_kernel[(min(backend.num_sms(x.get_device()), num_items),)](
        TensorDescriptor(x, [rows, depth], [depth, 1], box, layout),
        codes.values.view(torch.int32),
        codes.scales,
        codes.offsets,
        codes.channel,
        codes.bias,
        None if tiles is None else tiles.table,
        None if tiles is None else tiles.order,
        None if tiles is None else tiles.factors,
        out,
        rows,
        num_items,
        codes.n,
        codes.values.shape[-3],
        codes.scales.shape[-2],
        splits,
        codes.steps,
        cdiv(cdiv(codes.steps, 2), splits),
        1.0 if gate is None else gate.alpha,
        0.0 if gate is None else gate.limit,
        **kernel_constants(codes, out.dtype, block_m, gate),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def kernel_constants(codes: Codes, dtype: torch.dtype, block_m: int, gate: Gate | None) -> dict[str, Any]:
    """Constants of the kernel for a weight, whose results are in `dtype`."""
    x_stages = _x_stages(codes, dtype, block_m, gated=gate is not None)
    return {
        "RUN": codes.run,
        "CODE": codes.code,
        "EXPONENTS": codes.exponents,
        "GATED": gate is not None,
        "ACTIVATION": "none" if gate is None else gate.kind,
        "T": block_m,
        "W_STAGES": min(_W_STAGES[block_m], x_stages),
        "X_STAGES": x_stages,
        "AHEAD": _AHEAD[block_m],
        "UNPACKERS": _UNPACKERS[block_m],
    }


def _x_stages(codes: Codes, dtype: torch.dtype, block_m: int, *, gated: bool) -> int:
    """As many as there is shared memory for, beside weights, codes, and what turns results round; fewer than the weights' are
    the weights' as well."""
    words = (2 if codes.run == 32 and not codes.exponents else 1) * (1 if codes.offsets is None else 2)
    chunk = BLOCK_N * (64 + 4 * words)
    turned = 2 * 64 * 64 * dtype.itemsize // (2 if gated else 1)
    left = SHARED_BYTES - _UNPACKERS[block_m] * _AHEAD[block_m] * chunk - turned - _BARRIERS
    w_bytes, x_bytes = BLOCK_N * STEP * 2, block_m * STEP * 2
    most = (left - _W_STAGES[block_m] * w_bytes) // x_bytes
    return min(_X_STAGES[block_m], most) if most >= _W_STAGES[block_m] else left // (w_bytes + x_bytes)
