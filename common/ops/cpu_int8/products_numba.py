"""Kernels of the 8-bit linears on a CPU, compiled at run time by Numba for the CPU that there is.

Weights are int8, one scale per output; activations are integers of 14 bits, one scale per row. Products are added up in
integers, exactly: a row has the same bits alone, in any batch and on any number of threads, whatever the order of sums.

A weight lies in tiles of 16 outputs × 2 inputs, so that one instruction multiplies a pair of a row's activations, broadcast,
with the pairs of 16 outputs and adds both products to 16 sums (AVX-512 VNNI's vpdpwssd; other CPUs get what LLVM makes of
it). Rows are computed in groups (`products_group`), and a group's activations lie side by side: [pairs, rows, 2]. So one
pointer leads to all of them; sixteen would not fit into a CPU's registers. One row is bound by memory: sums of several tiles
run side by side, and the weights' next lines are prefetched.

Kernels are parts of `forward_numba`: `part` says which of the rows, or of the outputs, a call is for.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from common.ops.cpu_int8.address_numba import address, emit_prefetch, float32_at, further, int8_at
from common.ops.cpu_int8.compiled_numba import REASSOCIATING, compiled
from common.ops.cpu_int8.lanes_numba import FLOATS, I64, INTEGERS, MAX_GROUP, emit_load, emit_spread, emit_store
from common.ops.cpu_int8.powers_numba import power_of_two
from common.ops.cpu_int8.weights import LANES, LARGEST, PAIRS

CHUNK_PAIRS = 1024
"""Pairs of inputs whose products fit into 32-bit sums: 2 · 1024 · 127 · 8191 < 2^31. Sums of chunks are added as float32."""

_SUMS_AT_ONCE = 8 if MAX_GROUP == 16 else 4
"""Fewer rows than this take several tiles at once: one sum would wait for itself."""

_EXACT = 8 if MAX_GROUP == 16 else 3
"""Up to so many rows there is a kernel for each number of them."""

_AHEAD = 256
"""Tiles; 8 KB of weights."""

_TILE, _WIDE, _HALVES = (ir.VectorType(ir.IntType(bits), 32) for bits in (8, 32, 16))
_FLOATS = types.CPointer(types.float32)


def _multiply_tiles(rows: int) -> Any:
    """multiply(activations, weights, num_pairs, row_scale, scale, start, start_stride, out, out_stride): for a group of `rows`
    rows, out[row, 16] = start[row, 16] + (row_scale[row] · scale[16]) · the sums over `num_pairs` tiles of weights.

    num_pairs: a multiple of `PAIRS`."""
    unroll = max(1, _SUMS_AT_ONCE // rows)

    @intrinsic
    def multiply(typing_context, activations, weights, num_pairs, row_scale, scale, start, start_stride, out, out_stride):
        signature = types.void(
            types.CPointer(types.int32),
            types.CPointer(types.int8),
            types.int64,
            _FLOATS,
            _FLOATS,
            _FLOATS,
            types.int64,
            _FLOATS,
            types.int64,
        )

        def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
            activations, weights, num_pairs, row_scale, scale, start, start_stride, out, out_stride = args
            tiles = builder.bitcast(weights, _TILE.as_pointer())
            before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.branch(loop)
            builder.position_at_end(loop)
            index = builder.phi(I64)
            index.add_incoming(ir.Constant(I64, 0), before)
            sums = [[builder.phi(INTEGERS) for _ in range(rows)] for _ in range(unroll)]
            for step, group in enumerate(sums):
                at = builder.add(index, ir.Constant(I64, step))
                if step % 2 == 0:  # two tiles to a cache line
                    emit_prefetch(builder, builder.gep(tiles, [builder.add(at, ir.Constant(I64, _AHEAD))]))
                wide = builder.sext(emit_load(builder, builder.gep(tiles, [at]), _TILE), _WIDE)
                first = builder.gep(activations, [builder.mul(at, ir.Constant(I64, rows))])
                for row, total in enumerate(group):
                    total.add_incoming(ir.Constant(INTEGERS, [0] * 16), before)
                    products = _pair_products(builder, wide, builder.gep(first, [ir.Constant(I64, row)]))
                    total.add_incoming(builder.add(total, products), loop)
            following = builder.add(index, ir.Constant(I64, unroll))
            index.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", following, num_pairs), loop, after)
            builder.position_at_end(after)
            scales = emit_load(builder, scale)
            for row in range(rows):
                total = sums[0][row].incomings[1][0]
                for group in sums[1:]:
                    total = builder.add(total, group[row].incomings[1][0])
                at = ir.Constant(I64, row)
                mine = builder.fmul(emit_spread(builder, builder.load(builder.gep(row_scale, [at])), FLOATS), scales)
                begun = emit_load(builder, builder.gep(start, [builder.mul(start_stride, at)]))
                value = builder.fadd(builder.fmul(builder.sitofp(total, FLOATS), mine), begun)
                emit_store(builder, value, builder.gep(out, [builder.mul(out_stride, at)]))
            return context.get_dummy_value()

        return signature, generate

    return multiply


def _pair_products(builder: Any, wide: Any, place: Any) -> Any:
    """wide: 32 weights, (output, input) pairs. Returns for each of 16 outputs the sum of its two products with the pair at
    `place`: the form in which LLVM recognises a multiply-add of pairs."""
    pair = builder.load(place)
    pair.align = 4
    products = builder.mul(wide, builder.sext(builder.bitcast(emit_spread(builder, pair, INTEGERS), _HALVES), _WIDE))
    even, odd = (ir.Constant(INTEGERS, [2 * lane + which for lane in range(16)]) for which in (0, 1))
    nothing = ir.Constant(_WIDE, ir.Undefined)
    return builder.add(builder.shuffle_vector(products, nothing, even), builder.shuffle_vector(products, nothing, odd))


_tiles1, _tiles2, _tiles3, _tiles4, _tiles5, _tiles6, _tiles7, _tiles8 = (_multiply_tiles(rows) for rows in range(1, 9))
_tiles16 = _multiply_tiles(16)


@compiled()
def products_group(row, rows):
    """(first, count): the group that `row` is computed in: as many rows as fit, and what is left of them as one group, or two
    of more than `_EXACT`. Each group reads the weights, so that a row beside four others costs as much as four."""
    first = row // MAX_GROUP * MAX_GROUP
    count = min(MAX_GROUP, rows - first)
    if count == MAX_GROUP or count <= _EXACT:
        return first, count
    if row < first + _EXACT:
        return first, _EXACT
    return first + _EXACT, count - _EXACT


@compiled()
def multiply(part, parts, linears, which, data, row_scale, rows, out):
    """out[:rows] = linear `which` of a `Linears` of what `_quantise_row` left in data and row_scale. `part` of `parts` of its
    outputs."""
    weight = linears[which]
    tiles, scale, bias = int8_at(weight.tiles), float32_at(weight.scale), float32_at(weight.bias)
    pairs, width = weight.pairs, out.shape[1]
    for block in range(weight.blocks * part // parts, weight.blocks * (part + 1) // parts):
        row = 0
        while row < rows:
            _, count = products_group(row, rows)
            place = address(out, row * width + block * LANES)
            start, stride = further(bias, weight.bias_step * block * LANES), 0
            for begin in range(0, pairs, CHUNK_PAIRS):
                num_pairs = min(CHUNK_PAIRS, pairs - begin)
                activations = address(data, row * pairs + begin * count)
                weights = further(tiles, (block * pairs + begin) * 2 * LANES)
                scales, outputs = address(row_scale, row), further(scale, block * LANES)
                if count == 16:
                    _tiles16(activations, weights, num_pairs, scales, outputs, start, stride, place, width)
                elif count == 8:
                    _tiles8(activations, weights, num_pairs, scales, outputs, start, stride, place, width)
                elif count == 7:
                    _tiles7(activations, weights, num_pairs, scales, outputs, start, stride, place, width)
                elif count == 6:
                    _tiles6(activations, weights, num_pairs, scales, outputs, start, stride, place, width)
                elif count == 5:
                    _tiles5(activations, weights, num_pairs, scales, outputs, start, stride, place, width)
                elif count == 4:
                    _tiles4(activations, weights, num_pairs, scales, outputs, start, stride, place, width)
                elif count == 3:
                    _tiles3(activations, weights, num_pairs, scales, outputs, start, stride, place, width)
                elif count == 2:
                    _tiles2(activations, weights, num_pairs, scales, outputs, start, stride, place, width)
                else:
                    _tiles1(activations, weights, num_pairs, scales, outputs, start, stride, place, width)
                start, stride = place, width
            row += count


@compiled(fastmath=REASSOCIATING)
def _to_integers(x, integers):
    """x: float32 [size]; integers: int16 [≥ size], gets round(x / scale), and zeros behind. Returns the scale."""
    largest = np.float32(0)
    for i in range(len(x)):
        largest = max(largest, abs(x[i]))
    scale = max(largest, np.float32(1e-30)) / np.float32(LARGEST)
    inverse = np.float32(1) / scale
    for i in range(len(x)):
        integers[i] = np.int16(np.rint(x[i] * inverse))
    integers[len(x) :] = 0
    return scale


@compiled()
def _is_finite(x):
    """Return whether no number of float32 x is NaN or infinite: by its bits, which fast-math flags say nothing about."""
    bits = x.view(np.int32)
    largest = np.int32(0)
    for i in range(len(bits)):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return largest < np.int32(0x7F800000)


@compiled()
def quantise_row(x, row, rows, data, row_scale):
    """x: float32 [size], row `row` of `rows`. data: int32 [≥ rows · pairs], pairs of 16 bits, see above; pairs: half of `size`,
    rounded up to `PAIRS`. row_scale: float32 [≥ rows]; NaN where x is not finite, so that all products of the row are NaN."""
    pairs = -(-len(x) // (2 * PAIRS)) * PAIRS
    integers = np.empty(2 * pairs, np.int16)
    if _is_finite(x):
        row_scale[row] = _to_integers(x, integers)
    else:
        for i in range(2 * pairs):
            integers[i] = 0
        row_scale[row] = np.float32(np.nan)
    first, count = products_group(row, rows)
    place = first * pairs + row - first
    both = integers.view(np.int32)
    for pair in range(pairs):
        data[place + pair * count] = both[pair]


@compiled(fastmath=REASSOCIATING)
def rms_normalise(residual, weight, eps, out):
    """out = RMSNorm(residual) · weight, all float32 [size]."""
    total = np.float32(0)
    for i in range(len(residual)):
        total += residual[i] * residual[i]
    factor = np.float32(1) / np.float32(math.sqrt(total / np.float32(len(residual)) + np.float32(eps)))
    for i in range(len(residual)):
        out[i] = residual[i] * factor * weight[i]


@compiled()
def normalise(row, rows, residual, weight, eps, data, row_scale):
    """RMSNorm(residual[row]) · weight, quantised."""
    normal = np.empty(len(weight), np.float32)
    rms_normalise(residual[row], weight, eps, normal)
    quantise_row(normal, row, rows, data, row_scale)


@compiled()
def add_and_normalise(row, rows, residual, delta, weight, eps, data, row_scale):
    """residual[row] += delta[row, :size]; then `normalise`."""
    for i in range(len(weight)):
        residual[row, i] += delta[row, i]
    normalise(row, rows, residual, weight, eps, data, row_scale)


@compiled(fastmath=REASSOCIATING)
def _gate(both, size, bits, mantissas, out):
    """both: float32 [2 · size]. out: silu of the first half times the second; e^-x is 2^n · 2^f."""
    for i in range(size):
        power = min(max(both[i] * np.float32(-1.4426950408889634), np.float32(-126)), np.float32(126))
        whole = np.rint(power)
        mantissas[i] = power_of_two(power - whole)
        bits[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    powers = bits.view(np.float32)
    for i in range(size):
        out[i] = both[i] / (np.float32(1) + mantissas[i] * powers[i]) * both[size + i]


@compiled()
def gate(row, rows, both, size, data, row_scale):
    """both: float32 [rows, ≥ 2 · size], gate and up. silu(gate) · up of `row`, quantised."""
    bits, mantissas, out = np.empty(size, np.int32), np.empty(size, np.float32), np.empty(size, np.float32)
    _gate(both[row], size, bits, mantissas, out)
    quantise_row(out, row, rows, data, row_scale)


@compiled()
def quantise(row, rows, x, size, data, row_scale):
    """x: float32 [rows, ≥ size]."""
    quantise_row(x[row, :size], row, rows, data, row_scale)
