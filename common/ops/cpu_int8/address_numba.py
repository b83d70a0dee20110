"""Pointers, for kernels that count offsets themselves: views of arrays cost more than what is done with them."""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def address(typing_context, array, offset):
    """A pointer to element `offset` of `array`, which is contiguous."""
    signature = types.CPointer(array.dtype)(array, types.int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        proxy = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=args[0])
        return builder.gep(proxy.data, [args[1]])

    return signature, generate


@intrinsic
def further(typing_context, pointer, offset):
    """`pointer`, `offset` elements on."""
    signature = pointer(pointer, types.int64)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return signature, generate


def _pointer_to(dtype: Any) -> Any:
    @intrinsic
    def pointer(typing_context, number):
        signature = types.CPointer(dtype)(types.int64)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return signature, generate

    return pointer


int8_at, float32_at = _pointer_to(types.int8), _pointer_to(types.float32)
"""Of an address that Python holds, an int64."""


def emit_prefetch(builder: Any, place: Any) -> None:
    """The cache line at `place` will be read soon; it need not exist."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    read, keep, data = (ir.Constant(number, value) for value in (0, 3, 1))
    builder.call(function, [builder.bitcast(place, byte), read, keep, data])


@intrinsic
def prefetch(typing_context, pointer):
    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(pointer), generate
