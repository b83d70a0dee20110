"""Where an op runs: Triton kernels for CUDA tensors, plain torch for the rest.

Tests run the kernels on CPU tensors too, in Triton's interpreter: inside `interpreted()`, in a process that was started with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

_interpreted = ContextVar("interpreted", default=False)


def on_device(x: torch.Tensor) -> bool:
    """Is `x` for the Triton kernels?"""
    return x.is_cuda or _interpreted.get()


def pdl(x: torch.Tensor) -> bool:
    """Can a kernel on `x` start while the one before it still runs (programmatic dependent launch, Hopper and later)?"""
    return x.is_cuda and _capability(x.get_device()) >= (9, 0)


def has_warpgroup_products(device: torch.device) -> bool:
    """Does the GPU have Hopper's products of warp groups, which later cards do without?"""
    return device.type == "cuda" and _capability(device.index or 0) == (9, 0)


@cache
def num_sms(index: int) -> int:
    """Multiprocessors of CUDA device `index`; -1, a CPU under the interpreter, has a few."""
    return 4 if index < 0 else torch.cuda.get_device_properties(index).multi_processor_count


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def gpu_answers() -> bool:
    """False after an error, such as a read outside memory, that every later call gets as well. Waits for what runs."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except torch.AcceleratorError:
        return False
    return True


def ready_for_threads() -> None:
    """Call before several threads launch their first kernels at once. Triton then makes its driver, with a C compiler, only
    once, and one thread imports Gluon: its modules import each other, and of two threads that begin with different ones, one
    can get a deadlock error. A tuning table would hold that against the candidate, and be kept."""
    if find_spec("triton") is not None:
        import_module("triton.experimental.gluon")
    if torch.cuda.is_available():
        from triton.runtime import driver

        driver.active.get_current_target()


@contextmanager
def interpreted() -> Iterator[None]:
    """CPU tensors go through the Triton kernels meanwhile, in this thread or task and in tasks that it starts.

    :raises RuntimeError: without TRITON_INTERPRET=1 they could not.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("start the process with TRITON_INTERPRET=1 to run Triton kernels on a CPU")
    before = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(before)
