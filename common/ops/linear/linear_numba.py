"""Linears in float32 and bfloat16 on a CPU, compiled at run time by Numba for the CPU that there is.

Every output of every row is summed up in one order, whatever the rows beside it and however many threads: products in chunks of
256 inputs, each chunk one chain of multiply-adds from its first input to its last, chunks added first to last. So a row has the
same bits in any batch, and on any CPU that fuses a multiply with an add. All sums are float32.

A weight lies in tiles of 16 outputs, [blocks, in_features, 16]: an input's 16 weights are one vector, multiplied with that
input of a row in every lane. Rows are computed in groups and a group's inputs lie side by side, [in_features, rows]. Few rows
take several tiles at once, since one sum would wait for itself.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOptionalCall=false
from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from common.ops.cpu_int8.address_numba import address, emit_prefetch
from common.ops.cpu_int8.compiled_numba import compiled
from common.ops.cpu_int8.lanes_numba import FLOATS, I64, INTEGERS, MAX_GROUP, emit_load, emit_spread, emit_store, row_group
from common.ops.cpu_int8.team_cpu import together
from common.ops.cpu_int8.team_numba import new_counters, shared
from common.ops.cpu_int8.weights import LANES

CHUNK = 256
"""Inputs whose products are summed up before they are added to what chunks before them gave."""

_AT_ONCE = 8 if MAX_GROUP == 16 else 4
"""Sums that keep a CPU busy; fewer rows than this take several tiles at once."""

TILES_AT_ONCE = 4
"""Tiles of a weight are computed in so many or fewer at once; there is a multiple of them."""

_AHEAD = 64
"""Inputs by which weights are fetched ahead."""

_WEIGHTS_PER_US, _PRODUCTS_PER_US = 3_000, 30_000
"""About what one thread reads, and multiplies, of a weight that is not in its cache."""

_WORTH_US = 150
"""Work that is worth one thread more: to wake it takes about half of this."""

_PARTS_PER_THREAD = 4
_FLOATS = types.CPointer(types.float32)
_HALVES = ir.VectorType(ir.IntType(16), 16)


def _multiply_tiles(rows: int, tiles: int, dtype: Any) -> Any:
    """multiply(inputs, weights, tile_stride, count, out, out_stride): out[row, 16 · tile:][:16] += Σ over `count` inputs of
    inputs[input, row] · weights[tile, input], for a group of `rows` rows and `tiles` tiles of weights in `dtype`."""

    @intrinsic
    def multiply(typing_context, inputs, weights, tile_stride, count, out, out_stride):
        signature = types.void(_FLOATS, types.CPointer(dtype), types.int64, types.int64, _FLOATS, types.int64)

        def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
            inputs, weights, tile_stride, count, out, out_stride = args
            firsts = [builder.gep(weights, [builder.mul(tile_stride, ir.Constant(I64, tile))]) for tile in range(tiles)]
            before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.branch(loop)
            builder.position_at_end(loop)
            index = builder.phi(I64)
            index.add_incoming(ir.Constant(I64, 0), before)
            sums = [[builder.phi(FLOATS) for _ in range(rows)] for _ in range(tiles)]
            vectors = [_weights(builder, builder.gep(first, [builder.mul(index, _number(LANES))])) for first in firsts]
            place = builder.gep(inputs, [builder.mul(index, _number(rows))])
            for row in range(rows):
                given = builder.load(builder.gep(place, [_number(row)]))
                given.align = 4
                spread = emit_spread(builder, given, FLOATS)
                for group, vector in zip(sums, vectors, strict=True):
                    total = group[row]
                    total.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
                    product = builder.fmul(spread, vector, flags=("contract",))
                    total.add_incoming(builder.fadd(total, product, flags=("contract",)), loop)
            following = builder.add(index, _number(1))
            index.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
            builder.position_at_end(after)
            for tile, group in enumerate(sums):
                for row, total in enumerate(group):
                    target = builder.gep(out, [builder.add(builder.mul(out_stride, _number(row)), _number(LANES * tile))])
                    emit_store(builder, builder.fadd(emit_load(builder, target), total.incomings[1][0]), target)
            return context.get_dummy_value()

        return signature, generate

    return multiply


def _number(value: int) -> Any:
    return ir.Constant(I64, value)


def _weights(builder: Any, place: Any) -> Any:
    """The 16 weights at `place`, in float32; bfloat16 is the upper half of it."""
    emit_prefetch(builder, builder.gep(place, [_number(LANES * _AHEAD)]))
    if place.type.pointee == ir.FloatType():
        return emit_load(builder, place)
    wide = builder.zext(emit_load(builder, place, _HALVES), INTEGERS)
    return builder.bitcast(builder.shl(wide, ir.Constant(INTEGERS, [16] * LANES)), FLOATS)


def _tiles_of(rows: int) -> int:
    return max(1, min(TILES_AT_ONCE, _AT_ONCE // rows))


_tiles1 = _tiles2 = _tiles4 = _tiles8 = _tiles16 = _share_multiply = None
"""These are globals of copies of the functions below, one copy for each dtype of weights; see `_step_for`."""

_at_once = np.array([_tiles_of(rows) if rows else 0 for rows in range(MAX_GROUP + 1)])


@compiled()
def _gather(row, rows, x, data):
    """Put the inputs of row `row` where the group that it is computed in has them."""
    inputs = x.shape[1]
    first, count = row_group(row, rows)
    place = first * inputs + row - first
    for index in range(inputs):
        data[place + index * count] = x[row, index]


_share_gather = shared(_gather)


def _multiply(part, parts, weights, data, rows, out):
    """`part` of `parts` of the outputs."""
    inputs, width = weights.shape[1], out.shape[1]
    stride, quads = inputs * LANES, weights.shape[0] // TILES_AT_ONCE
    for quad in range(quads * part // parts, quads * (part + 1) // parts):
        row = 0
        while row < rows:
            _, count = row_group(row, rows)
            for begin in range(0, inputs, CHUNK):
                number = min(CHUNK, inputs - begin)
                given = address(data, row * inputs + begin * count)
                for block in range(quad * TILES_AT_ONCE, (quad + 1) * TILES_AT_ONCE, _at_once[count]):
                    tiles = address(weights, block * stride + begin * LANES)
                    place = address(out, row * width + block * LANES)
                    if count == 16:
                        _tiles16(given, tiles, stride, number, place, width)
                    elif count == 8:
                        _tiles8(given, tiles, stride, number, place, width)
                    elif count == 4:
                        _tiles4(given, tiles, stride, number, place, width)
                    elif count == 2:
                        _tiles2(given, tiles, stride, number, place, width)
                    else:
                        _tiles1(given, tiles, stride, number, place, width)
            row += count


def _step(counters, threads, weights, x, data, out):
    """See `multiply`. Every thread calls it with the same arguments."""
    rows, quads = len(x), weights.shape[0] // TILES_AT_ONCE
    phase = _share_gather(counters, 0, rows, (rows, x, data))
    parts = 1 if threads == 1 else min(quads, _PARTS_PER_THREAD * threads)
    _share_multiply(counters, phase, parts, (parts, weights, data, rows, out))


@cache
def _step_for(dtype: Any) -> Any:
    """The step for weights of Numba's `dtype`. What differs is in the globals of a copy, not around it: what a kept function
    closes over is part of its key, and a compiled function is another one in every process."""
    tiles = {f"_tiles{rows}": _multiply_tiles(rows, _tiles_of(rows), dtype) for rows in (1, 2, 4, 8, 16)}
    multiply = compiled()(FunctionType(_multiply.__code__, globals() | tiles, f"multiply_{dtype}"))
    step = FunctionType(_step.__code__, globals() | {"_share_multiply": shared(multiply)}, f"linear_{dtype}")
    step.__qualname__ = step.__name__
    return compiled(kept=True)(step)


def multiply(x: NDArray[np.float32], weights: NDArray[Any], out: NDArray[np.float32], threads: int) -> None:
    """Add x Wᵀ to `out`.

    x: [rows, inputs], contiguous. weights: [blocks, inputs, 16], float32, or bfloat16 as uint16; blocks: a multiple of
    `TILES_AT_ONCE`. out: [rows, 16 · blocks], contiguous.
    """
    work_us = weights.size / _WEIGHTS_PER_US + len(x) * weights.size / _PRODUCTS_PER_US
    threads = max(1, min(threads, int(work_us / _WORTH_US)))
    step = _step_for(types.float32 if weights.dtype == np.float32 else types.uint16)
    together(threads, step, new_counters(2), threads, weights, x, np.empty(x.size, np.float32), out)
