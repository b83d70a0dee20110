"""Vectors of 16 lanes, one for each output of a tile, as linears on a CPU use them; and how many rows go together."""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from typing import Any

from llvmlite import ir

from common.ops.cpu_int8.compiled_numba import compiled, has_feature

MAX_GROUP = 16 if has_feature("avx512f") else 4
"""Rows computed together: as many as there are registers for their sums."""

I64 = ir.IntType(64)
INTEGERS, FLOATS = ir.VectorType(ir.IntType(32), 16), ir.VectorType(ir.FloatType(), 16)


def emit_spread(builder: Any, number: Any, kind: Any) -> Any:
    """A vector with `number` in every lane."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(INTEGERS, [0] * 16))


def emit_load(builder: Any, place: Any, kind: Any = FLOATS) -> Any:
    """The vector at `place`, which need not be aligned to more than one number."""
    values = builder.load(builder.bitcast(place, kind.as_pointer()))
    values.align = _alignment(kind)
    return values


def emit_store(builder: Any, values: Any, place: Any) -> None:
    builder.store(values, builder.bitcast(place, values.type.as_pointer())).align = _alignment(values.type)


def _alignment(kind: Any) -> int:
    return 4 if kind.element == ir.FloatType() else kind.element.width // 8


@compiled()
def row_group(row, rows):
    """(first, count): the group that `row` is computed in, of powers of two, the largest first."""
    first, count = 0, MAX_GROUP
    while True:
        whole = (rows - first) // count * count
        if row < first + whole:
            return first + (row - first) // count * count, count
        first += whole
        count //= 2
