"""Order between a block's bytes and its generation, on processors that reorder memory accesses.

A reader copies a block and reads its generation afterwards; an owner raises the generation and writes afterwards. x86 keeps
loads in order, and stores. ARM keeps neither: a generation read too early would vouch for bytes that were written later. So
both sides call a fence in between (docs/decisions/0013-memory-order-of-generations.md).
"""

from __future__ import annotations

import platform
from collections.abc import Callable

from common.protocol.errors import ConfigError

_IN_ORDER = frozenset({"x86_64", "amd64"})


def memory_fence(machine: str = "") -> Callable[[], None]:
    """Return what a thread calls between two accesses that others must see in this order. On x86 it does nothing.

    machine: the processor, as `platform.machine` names it; empty: this one.

    :raises ConfigError: the processor may reorder, and numba, which makes the fence, can't be imported.
    """
    machine = (machine or platform.machine()).lower()
    if machine in _IN_ORDER:
        return _nothing
    try:
        from common.transfer.fence_numba import full_fence
    except ImportError as error:
        raise ConfigError(
            f"a {machine} processor reorders memory accesses, and numba, which makes the fence against that, can't be imported "
            f"({error}): Penstock runs on x86-64 and, with numba, on aarch64"
        ) from error
    full_fence()  # compiled now, and not under the first request
    return full_fence


def _nothing() -> None:
    """Loads stay in order, and stores."""
