"""How kernels for a CPU are compiled: without the interpreter's lock, without bounds checks, and kept between starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

REASSOCIATING = frozenset({"reassoc", "contract", "nsz"})
"""Sums may be taken in the order that suits vectors: the same one for every row, since the code is the same."""


def compiled(*, fastmath: frozenset[str] = frozenset()) -> Callable[[Callable[..., Any]], Any]:
    """Compiled at the first call. Where no folder can be written to, it is compiled at every start."""

    def decorate(kernel: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {"nogil": True, "boundscheck": False, "fastmath": set(fastmath) or False}
        try:
            return numba.njit(cache=True, **options)(kernel)
        except RuntimeError:
            return numba.njit(**options)(kernel)

    return decorate
