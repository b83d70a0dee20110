"""Pointers into arrays, for kernels that count offsets themselves: views of arrays cost more than what is done with them."""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from typing import Any

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
