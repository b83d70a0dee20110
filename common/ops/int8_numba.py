"""Kernels of the 8-bit linears on a CPU, compiled at run time by Numba for the CPU that there is.

Weights are int8, one scale per output; activations are integers of 14 bits, one scale per row. Products are added up in
integers, exactly: a row has the same bits alone, in any batch and on any number of threads, whatever the order of sums.

A weight lies in tiles of 16 outputs × 2 inputs, so that one instruction multiplies a pair of a row's activations, broadcast,
with the pairs of 16 outputs and adds both products to 16 sums (AVX-512 VNNI's vpdpwssd; other CPUs get what LLVM makes of
it). One row is bound by memory, so the weights' next lines are prefetched.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from common.ops.address_numba import address
from common.ops.compiled_numba import REASSOCIATING, compiled
from common.ops.int8_cpu import LANES, LARGEST

CHUNK_PAIRS = 1024
"""Pairs of inputs after which 32-bit sums are added to 64-bit ones: 2 · 1024 · 127 · 8191 < 2^31."""

_AHEAD = 256
"""Tiles; 8 KB of weights."""

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_SUMS, _HALVES, _WIDE, _TILE = (ir.VectorType(kind, n) for kind, n in ((_I32, 16), (_I16, 32), (_I32, 32), (_I8, 32)))


def _dot_tile(rows: int) -> Any:
    """dot(activations, row_stride, weights, num_pairs, sums): for `rows` rows of activations, sums[row, 16] over `num_pairs`
    tiles of weights."""

    @intrinsic
    def dot(typing_context, activations, row_stride, weights, num_pairs, sums):
        signature = types.void(
            types.CPointer(types.int16), types.int64, types.CPointer(types.int8), types.int64, types.CPointer(types.int32)
        )

        def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
            activations, row_stride, weights, num_pairs, sums = args
            pairs = builder.bitcast(activations, _I32.as_pointer())
            stride = builder.sdiv(row_stride, ir.Constant(_I64, 2))
            firsts = [builder.gep(pairs, [builder.mul(stride, ir.Constant(_I64, row))]) for row in range(rows)]
            tiles = builder.bitcast(weights, _TILE.as_pointer())
            before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.branch(loop)
            builder.position_at_end(loop)
            index = builder.phi(_I64)
            index.add_incoming(ir.Constant(_I64, 0), before)
            totals = [builder.phi(_SUMS) for _ in range(rows)]
            _prefetch(builder, builder.gep(tiles, [builder.add(index, ir.Constant(_I64, _AHEAD))]))
            tile = builder.load(builder.gep(tiles, [index]))
            tile.align = 1
            wide = builder.sext(tile, _WIDE)
            for total, first in zip(totals, firsts, strict=True):
                total.add_incoming(ir.Constant(_SUMS, [0] * 16), before)
                total.add_incoming(builder.add(total, _pair_products(builder, wide, builder.gep(first, [index]))), loop)
            following = builder.add(index, ir.Constant(_I64, 1))
            index.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", following, num_pairs), loop, after)
            builder.position_at_end(after)
            out = builder.bitcast(sums, _SUMS.as_pointer())
            for row, total in enumerate(totals):
                place = builder.gep(out, [ir.Constant(_I64, row)])
                builder.store(total.incomings[1][0], place).align = 4
            return context.get_dummy_value()

        return signature, generate

    return dot


def _pair_products(builder: Any, wide: Any, place: Any) -> Any:
    """wide: 32 weights, (output, input) pairs. Returns for each of 16 outputs the sum of its two products with the pair at
    `place`: the form in which LLVM recognises a multiply-add of pairs."""
    pair = builder.load(place)
    pair.align = 2
    nothing = ir.Constant(_SUMS, ir.Undefined)
    first = builder.insert_element(nothing, pair, ir.Constant(_I32, 0))
    spread = builder.shuffle_vector(first, nothing, ir.Constant(_SUMS, [0] * 16))
    products = builder.mul(wide, builder.sext(builder.bitcast(spread, _HALVES), _WIDE))
    even, odd = (ir.Constant(_SUMS, [2 * lane + which for lane in range(16)]) for which in (0, 1))
    nothing = ir.Constant(_WIDE, ir.Undefined)
    return builder.add(builder.shuffle_vector(products, nothing, even), builder.shuffle_vector(products, nothing, odd))


def _prefetch(builder: Any, place: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_I8.as_pointer()], kind)
    read, keep, data = (ir.Constant(_I32, number) for number in (0, 3, 1))
    builder.call(prefetch, [builder.bitcast(place, _I8.as_pointer()), read, keep, data])


_dot1, _dot2, _dot4, _dot8, _dot16 = (_dot_tile(rows) for rows in (1, 2, 4, 8, 16))


@compiled()
def multiply(data, row_scale, tiles, scale, bias, out):
    """data: int16 [rows, 2 · pairs]; row_scale: float32 [rows]; tiles: int8 [⌈outputs / 16⌉, pairs, 16, 2]; scale, bias:
    float32 [outputs], bias possibly empty. out: float32 [rows, outputs]."""
    rows, size = data.shape
    outputs, pairs = out.shape[1], tiles.shape[1]
    sums = np.empty((16, LANES), np.int32)
    totals = np.empty((16, LANES), np.int64)
    for block in range(tiles.shape[0]):
        lanes = min(LANES, outputs - block * LANES)
        row = 0
        while row < rows:
            left = rows - row
            count = 16 if left >= 16 else 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
            totals[:count] = 0
            for begin in range(0, pairs, CHUNK_PAIRS):
                part = min(CHUNK_PAIRS, pairs - begin)
                activations = address(data, row * size + 2 * begin)
                weights = address(tiles, (block * pairs + begin) * 2 * LANES)
                if count == 16:
                    _dot16(activations, size, weights, part, address(sums, 0))
                elif count == 8:
                    _dot8(activations, size, weights, part, address(sums, 0))
                elif count == 4:
                    _dot4(activations, size, weights, part, address(sums, 0))
                elif count == 2:
                    _dot2(activations, size, weights, part, address(sums, 0))
                else:
                    _dot1(activations, size, weights, part, address(sums, 0))
                totals[:count] += sums[:count]
            for index in range(count):
                for lane in range(lanes):
                    place = block * LANES + lane
                    value = np.float32(totals[index, lane]) * (row_scale[row + index] * scale[place])
                    out[row + index, place] = value + bias[place] if len(bias) else value
            row += count


@compiled(fastmath=REASSOCIATING)
def _quantise_row(x, data):
    """x: float32 [size]; data: int16 [≥ size], gets round(x / scale), and zeros behind. Returns the scale."""
    largest = np.float32(0)
    for i in range(len(x)):
        largest = max(largest, abs(x[i]))
    scale = max(largest, np.float32(1e-30)) / np.float32(LARGEST)
    inverse = np.float32(1) / scale
    for i in range(len(x)):
        data[i] = np.int16(np.rint(x[i] * inverse))
    data[len(x) :] = 0
    return scale


@compiled()
def quantise(x, data, row_scale):
    """x: float32 [rows, size]. data: int16 [rows, size rounded up to even]; row_scale: float32 [rows]."""
    for row in range(x.shape[0]):
        row_scale[row] = _quantise_row(x[row], data[row])


@compiled(fastmath=REASSOCIATING)
def _normalise(residual, weight, eps, out):
    total = np.float32(0)
    for i in range(len(residual)):
        total += residual[i] * residual[i]
    factor = np.float32(1) / np.float32(math.sqrt(total / np.float32(len(residual)) + np.float32(eps)))
    for i in range(len(residual)):
        out[i] = residual[i] * factor * weight[i]


@compiled()
def add_norm_quantise(residual, delta, weight, eps, data, row_scale):
    """residual: float32 [rows, size], changed in place: + delta, [rows, size] or [0, 0]. data, row_scale: see `quantise`."""
    rows, size = residual.shape
    normal = np.empty(size, np.float32)
    for row in range(rows):
        if delta.shape[0]:
            for i in range(size):
                residual[row, i] += delta[row, i]
        _normalise(residual[row], weight, eps, normal)
        row_scale[row] = _quantise_row(normal, data[row])


@compiled(fastmath=frozenset({"contract", "nsz"}))
def _gate(both, size, bits, mantissas, out):
    """both: float32 [2 · size]. out: silu of the first half times the second; e^-x is 2^n · 2^f, f by its Taylor series."""
    for i in range(size):
        power = min(max(both[i] * np.float32(-1.4426950408889634), np.float32(-126)), np.float32(126))
        whole = np.rint(power)
        f = (power - whole) * np.float32(0.6931471805599453)
        series = np.float32(1 / 720) * f + np.float32(1 / 120)
        series = series * f + np.float32(1 / 24)
        series = series * f + np.float32(1 / 6)
        series = series * f + np.float32(0.5)
        series = series * f + np.float32(1)
        mantissas[i] = series * f + np.float32(1)
        bits[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    powers = bits.view(np.float32)
    for i in range(size):
        out[i] = both[i] / (np.float32(1) + mantissas[i] * powers[i]) * both[size + i]


@compiled()
def gate_quantise(both, data, row_scale):
    """both: float32 [rows, 2 · size], gate and up. data, row_scale: silu(gate) · up, see `quantise`."""
    rows, size = both.shape[0], both.shape[1] // 2
    bits, mantissas, out = np.empty(size, np.int32), np.empty(size, np.float32), np.empty(size, np.float32)
    for row in range(rows):
        _gate(both[row], size, bits, mantissas, out)
        row_scale[row] = _quantise_row(out, data[row])
