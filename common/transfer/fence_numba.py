"""A full memory fence, as one instruction of the processor."""

from __future__ import annotations

from typing import Any

import numba
from numba import types
from numba.extending import intrinsic


@intrinsic
def _fence(typing_context):
    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@numba.njit(nogil=True)
def full_fence():
    """No load or store moves across this, in either direction, as other processors see it."""
    _fence()  # pyright: ignore[reportCallIssue]  # an intrinsic is not called with its first parameter
