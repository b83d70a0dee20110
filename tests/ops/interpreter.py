"""Makes Triton's interpreter round as a GPU does, and keep to tensors as compute-sanitizer sees to it (`tensor_guard`).

Triton 3.6 interprets float32 → bfloat16 by cutting bits off, and conversions to float8 with carries lost; a GPU rounds to
nearest, ties to even, and float8 saturates. `tests/ops/conftest.py` calls `act_as_a_gpu`; tests elsewhere that run kernels in
the interpreter call it too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.ops.interpreter_overhead import reduce_overhead
from tests.ops.tensor_guard import guard_kernels

_FLOATS: dict[Any, tuple[torch.dtype, type[np.generic]]] = {
    tl.float64: (torch.float64, np.float64),
    tl.float32: (torch.float32, np.float32),
    tl.float16: (torch.float16, np.float16),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
}
_Builder: Any = interpreter.InterpreterBuilder
_cast = _Builder.cast_impl
_patch_tensor: Any = interpreter._patch_lang_tensor


def _convert(source: Any, target: Any) -> Any:
    """source: a handle of floats. Returns one of `target`."""
    given, (dtype, storage) = _FLOATS[source.dtype.scalar][0], _FLOATS[target]
    bits = torch.from_numpy(np.array(source.data, order="C").reshape(-1).view(np.uint8)).view(given)
    if target in (tl.float8e4nv, tl.float8e5):
        bits = bits.float().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    data = bits.to(dtype).view(torch.uint8).numpy().view(storage).reshape(np.shape(source.data))
    return interpreter.TensorHandle(data, target)


def _cast_rounding(builder: Any, source: Any, target: Any) -> Any:
    if source.dtype.scalar in _FLOATS and target.scalar in _FLOATS:
        return _convert(source, target.scalar)
    return _cast(builder, source, target)


def _patch_with_bounds(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of one element there, which numpy 2.4 refuses as bounds of a `range`."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_dot = _Builder.create_dot


def _dot_of_halves(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter keeps bfloat16 as bits and multiplies those."""
    a, b = (_convert(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _dot(builder, a, b, *rest)


def act_as_a_gpu() -> None:
    """From here on, in this process."""
    guard_kernels()
    reduce_overhead()
    interpreter._patch_lang_tensor = _patch_with_bounds
    _Builder.cast_impl = _cast_rounding
    _Builder.create_dot = _dot_of_halves
    _Builder.create_fp_to_fp = lambda builder, source, target, rounding: _convert(source, target.scalar)
