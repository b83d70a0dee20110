"""Bounds on processor time: neither a busy machine nor a collection of the test run's own garbage counts."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def costs_at_most(limit_s: float) -> Iterator[None]:
    """Fail unless the block takes at most `limit_s` seconds of this thread's processor time. Cyclic garbage is left alone."""
    was_enabled = gc.isenabled()
    gc.disable()
    began = time.thread_time()
    try:
        yield
        taken_s = time.thread_time() - began
    finally:
        if was_enabled:
            gc.enable()
    assert taken_s <= limit_s, f"{taken_s:.3f} s of processor time, of {limit_s} s"
