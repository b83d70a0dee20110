"""Products of many short bfloat16 vectors with a float32 one, as instructions: the one stays in registers, nothing is called.

The many are given as their bits, int16.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _HALVES = types.CPointer(types.float32), types.CPointer(types.int16)

_SUMS_AT_ONCE = 4
"""Products whose lanes are summed up together."""


class _Vector:
    """A vector of `size` floats as several machine vectors."""

    def __init__(self, builder: Any, size: int) -> None:
        self.builder = builder
        self.lanes = next(lanes for lanes in (16, 8, 4, 2, 1) if size % lanes == 0)
        self.kind = ir.VectorType(_F32, self.lanes)
        self.starts = range(0, size, self.lanes)

    def load(self, place: Any) -> list[Any]:
        loads = [self.builder.load(self._at(place, start)) for start in self.starts]
        for load in loads:
            load.align = 4
        return loads

    def widen(self, place: Any, start: int) -> Any:
        """One machine vector from bfloat16: the upper halves of float32 numbers."""
        narrow, wide = ir.VectorType(ir.IntType(16), self.lanes), ir.VectorType(_I32, self.lanes)
        at = self.builder.bitcast(self.builder.gep(place, [ir.Constant(_I64, start)]), narrow.as_pointer())
        bits = self.builder.load(at)
        bits.align = 2
        bits = self.builder.shl(self.builder.zext(bits, wide), ir.Constant(wide, [16] * self.lanes))
        return self.builder.bitcast(bits, self.kind)

    def store(self, values: list[Any], place: Any) -> None:
        for start, value in zip(self.starts, values, strict=True):
            self.builder.store(value, self._at(place, start)).align = 4

    def spread(self, number: Any) -> Any:
        nothing = ir.Constant(self.kind, ir.Undefined)
        first = self.builder.insert_element(nothing, number, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes))

    def add_product(self, total: Any, a: Any, b: Any) -> Any:
        product = self.builder.fmul(a, b, flags=("contract",))
        return self.builder.fadd(total, product, flags=("contract",))

    def store_sums(self, values: list[Any], factor: Any, place: Any) -> None:
        """factor · the sum of each value's lanes, side by side at `place`.

        Upper halves are added onto lower ones until one number is left of each value; two values share a machine vector as
        soon as they fit. So a sum has the same bits in any company."""
        builder, count = self.builder, len(values)
        owned = self.lanes  # lanes of each value
        while owned > 1:
            half = owned // 2
            lower = [lane for lane in range(self.lanes) if lane % owned < half]
            lower += [self.lanes + lane for lane in lower]
            masks = [ir.Constant(ir.VectorType(_I32, self.lanes), [lane + up for lane in lower]) for up in (0, half)]
            pairs = [(values[at], values[min(at + 1, len(values) - 1)]) for at in range(0, len(values), 2)]
            values = [builder.fadd(*(builder.shuffle_vector(*pair, mask) for mask in masks)) for pair in pairs]
            owned = half
        factors = self.spread(factor)
        for at, value in enumerate(values):
            used = min(self.lanes, count - at * self.lanes)
            kept = ir.Constant(ir.VectorType(_I32, used), list(range(used)))
            value = builder.fmul(value, factors)
            value = builder.shuffle_vector(value, value, kept)
            target = builder.gep(place, [ir.Constant(_I64, at * self.lanes)])
            builder.store(value, builder.bitcast(target, value.type.as_pointer())).align = 4

    def _at(self, place: Any, start: int) -> Any:
        return self.builder.bitcast(self.builder.gep(place, [ir.Constant(_I64, start)]), self.kind.as_pointer())


def _loop(builder: Any, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """`body(index, carried)` for index in range(count), at least once; returns what it carries at the end."""
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_I64)
    index.add_incoming(ir.Constant(_I64, 0), before)
    values = [builder.phi(value.type) for value in carried]
    for value, start in zip(values, carried, strict=True):
        value.add_incoming(start, before)
    following = builder.add(index, ir.Constant(_I64, 1))
    results = body(index, values)
    index.add_incoming(following, loop)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    return results


@intrinsic(prefer_literal=True)
def add_weighted(typing_context, size, heads, sums, vectors, stride, weights, weight_stride, count):
    """For each of `heads`: sums[head · size:][:size] += Σ weights[head · weight_stride + i] · vectors[i · stride:], in order.
    `size` and `heads` are literals; count ≥ 1."""
    length, num_heads = _literal(size), _literal(heads)
    signature = types.void(size, heads, _FLOATS, _HALVES, types.int64, _FLOATS, types.int64, types.int64)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, _, sums, vectors, stride, weights, weight_stride, count = args
        vector = _Vector(builder, length)
        places = [builder.gep(sums, [ir.Constant(_I64, head * length)]) for head in range(num_heads)]
        firsts = [builder.gep(weights, [builder.mul(weight_stride, ir.Constant(_I64, head))]) for head in range(num_heads)]
        width = len(vector.starts)

        def body(index: Any, totals: list[Any]) -> list[Any]:
            place = builder.gep(vectors, [builder.mul(index, stride)])
            parts = [vector.widen(place, start) for start in vector.starts]
            results: list[Any] = []
            for head, first in enumerate(firsts):
                weight = vector.spread(builder.load(builder.gep(first, [index])))
                mine = totals[head * width : (head + 1) * width]
                results += [vector.add_product(total, weight, part) for total, part in zip(mine, parts, strict=True)]
            return results

        results = _loop(builder, count, [value for place in places for value in vector.load(place)], body)
        for head, place in enumerate(places):
            vector.store(results[head * width : (head + 1) * width], place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def dot_products(typing_context, size, heads, queries, vectors, stride, factor, products, product_stride, count):
    """For each of `heads`: products[head · product_stride + i] = factor · (queries[head · size:][:size] ·
    vectors[i · stride:]). `size` and `heads` are literals; count ≥ 1."""
    length, num_heads = _literal(size), _literal(heads)
    signature = types.void(size, heads, _FLOATS, _HALVES, types.int64, types.float32, _FLOATS, types.int64, types.int64)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _, _, queries, vectors, stride, factor, products, product_stride, count = args
        vector = _Vector(builder, length)
        held = [vector.load(builder.gep(queries, [ir.Constant(_I64, head * length)])) for head in range(num_heads)]
        firsts = [builder.gep(products, [builder.mul(product_stride, ir.Constant(_I64, head))]) for head in range(num_heads)]

        def several(number: int, begin: Any) -> list[Any]:
            """The products of `number` vectors from `begin` on."""
            places = [
                builder.gep(vectors, [builder.mul(builder.add(begin, ir.Constant(_I64, i)), stride)]) for i in range(number)
            ]
            totals: list[list[Any]] = []
            for at, start in enumerate(vector.starts):
                parts = [vector.widen(place, start) for place in places]
                if at == 0:
                    totals = [[builder.fmul(query[0], part) for part in parts] for query in held]
                    continue
                for query, sums in zip(held, totals, strict=True):
                    sums[:] = [vector.add_product(total, query[at], part) for total, part in zip(sums, parts, strict=True)]
            for first, sums in zip(firsts, totals, strict=True):
                vector.store_sums(sums, factor, builder.gep(first, [begin]))
            return []

        many = ir.Constant(_I64, _SUMS_AT_ONCE)
        whole, left = builder.sdiv(count, many), builder.srem(count, many)
        with builder.if_then(builder.icmp_signed(">", whole, ir.Constant(_I64, 0))):
            _loop(builder, whole, [], lambda index, _: several(_SUMS_AT_ONCE, builder.mul(index, many)))
        with builder.if_then(builder.icmp_signed(">", left, ir.Constant(_I64, 0))):
            done = builder.mul(whole, many)
            _loop(builder, left, [], lambda index, _: several(1, builder.add(done, index)))
        return context.get_dummy_value()

    return signature, generate


def _literal(number: Any) -> int:
    if not isinstance(number, types.IntegerLiteral):
        raise RequireLiteralValue("sizes of vectors are compiled in")
    return number.literal_value
