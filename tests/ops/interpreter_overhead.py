"""Spares Triton's interpreter work that does not change what kernels compute: kernels of small tensors run twice as fast.

`tests/ops/interpreter.py` calls `reduce_overhead`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_Scope: Any = interpreter._LangPatchScope
_Tensor: Any = tl.core.tensor
_patch_lang: Any = interpreter._patch_lang
_restore = _Scope.restore
_get_np_dtype: Any = interpreter._get_np_dtype

_patched: set[int] = set()
"""Modules of Triton's language, by id, that are patched while the running kernel runs."""
_np_dtypes: dict[str, np.dtype[Any]] = {}


def _patch_once(function: Any) -> Any:
    """Patch the modules that `function` uses, unless they are patched. Triton does so at every call of a kernel's function."""
    modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
    if modules and modules <= _patched:
        return _Scope()
    scope = _patch_lang(function)
    _patched.update(modules)
    return scope


def _restore_at_end(scope: Any) -> None:
    """Triton restores the scope of a kernel, at its end, and never that of a function that a kernel calls."""
    _patched.clear()
    _restore(scope)


def _np_dtype_of(dtype: Any) -> np.dtype[Any]:
    """Return numpy's type of a Triton type. Triton builds a table of all types at every call."""
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(dtype)
    return _np_dtypes[name]


@cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a tensor's `shape` and `numel`."""
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _init_tensor(tensor: Any, handle: Any, type: Any) -> None:
    """As `tl.tensor.__init__`, which builds the type of the shape's tuple each time."""
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.shape, tensor.numel = _shape(tuple(type.shape) if type.is_block() else ())


def reduce_overhead() -> None:
    """From here on, in this process."""
    interpreter._patch_lang = _patch_once
    _Scope.restore = _restore_at_end
    interpreter._get_np_dtype = _np_dtype_of
    _Tensor.__init__ = _init_tensor
    builder: Any = interpreter.interpreter_builder
    # sums and products of integers are computed twice to check them, and the check is dropped unless `debug` is set
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
