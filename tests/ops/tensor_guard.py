"""Kernels in Triton's interpreter keep to their tensors: it follows any pointer, to whatever lies there.

What compute-sanitizer says on a card, said on any machine of every kernel that a test runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

_Builder: Any = interpreter.InterpreterBuilder
_Executor: Any = interpreter.GridExecutor
_launch = _Executor.__call__
_running = threading.Lock()
_given: _Tensors | None = None


class OutsideTensors(Exception):
    """A kernel would have touched memory that is none of its arguments'."""


class _Tensors:
    """Where the arguments of the running kernel lie: exactly those views, not what else their storage holds."""

    def __init__(self, arguments: Iterable[Any]) -> None:
        spans = sorted({(tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)) for tensor in _tensors_in(arguments)})
        joined: list[list[int]] = [[0, 0]]
        for begin, end in spans:
            if begin <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([begin, end])
        self._begins, self._ends = np.array(joined, np.uint64).T

    def check(self, pointers: Any, mask: Any) -> None:
        """pointers: a handle; mask: a handle or an array of the same shape, or None."""
        places = pointers.data.reshape(-1)
        if mask is not None:
            mask = mask.data if isinstance(mask, interpreter.TensorHandle) else mask
            places = places[np.broadcast_to(np.asarray(mask, bool), pointers.data.shape).reshape(-1)]
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        index = np.searchsorted(self._begins, places, side="right") - 1
        outside = places[places + size > self._ends[index]]
        if len(outside):
            begin, end = self._nearest(int(outside[0]))
            where = f"at {int(outside[0]) - begin} of an argument's {end - begin} bytes"
            raise OutsideTensors(f"{len(outside)} of {len(places)} elements, one {where}")

    def _nearest(self, place: int) -> tuple[int, int]:
        spans = [(int(begin), int(end)) for begin, end in zip(self._begins, self._ends, strict=True)]
        return min(spans, key=lambda span: min(abs(place - span[0]), abs(place - span[1])))


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last one."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _tensors_in(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, tuple | list):
            yield from _tensors_in(argument)
            continue
        tensor = getattr(argument, "base", argument)  # of a tensor descriptor
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            yield tensor


def _launch_guarded(executor: Any, *args: Any, **kwargs: Any) -> Any:
    global _given
    if not _running.acquire(blocking=False):
        raise RuntimeError(
            "two threads interpret kernels: the place in the grid is the process's, they move each other's pointers"
        )
    _given = _Tensors((*args, *kwargs.values()))
    try:
        return _launch(executor, *args, **kwargs)
    finally:
        _given = None
        _running.release()


def _guarded(name: str, pointers: int, mask: int | None) -> Any:
    """The builder's method of that name, behind a check; where its pointers and its mask are among its arguments."""
    access = getattr(_Builder, name)

    def guarded(builder: Any, *args: Any, **named: Any) -> Any:
        assert _given is not None
        _given.check(args[pointers], None if mask is None else args[mask])
        return access(builder, *args, **named)

    return guarded


_GUARDED = {
    name: _guarded(name, *places)
    for name, places in {
        "create_masked_load": (0, 1),
        "create_masked_store": (0, 2),
        "create_atomic_rmw": (1, 3),
        "create_atomic_cas": (0, None),
    }.items()
}


def guard_kernels() -> None:
    """From here on, in this process."""
    _Executor.__call__ = _launch_guarded
    for name, guarded in _GUARDED.items():
        setattr(_Builder, name, guarded)
