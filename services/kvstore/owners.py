"""How much of a store each owner has, and whose blocks go first when it is full. Pure.

Owners are tenants, or models. Those that used the store lately have shares of it by their weights. One that has less than its
share loses nothing to others, and may use what they leave: a share is no limit. Requests without a tenant have one owner
together, the empty one, of weight 1. Models have equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bytes, str)

_MAX_IDLE = 1024
"""Beyond twice as many weights, so many of owners that were not active lately are forgotten."""


class Owners(Generic[Owner]):
    """The owners of one tier's blocks. `clock`: seconds; `active_s`: how long after its last use an owner keeps its share.
    `weights`: by owner, as their requests said; two tiers may share them."""

    def __init__(self, clock: Callable[[], float], active_s: float, weights: dict[Owner, float] | None = None) -> None:
        self.weights = {} if weights is None else weights
        self._clock = clock
        self._active_s = active_s
        self._bytes: dict[Owner, int] = {}
        self._used_at: dict[Owner, float] = {}

    def use(self, owner: Owner) -> None:
        """It asks for blocks, or brings some."""
        self._used_at[owner] = self._clock()

    def weigh(self, owner: Owner, weight: float) -> None:
        """Its requests say this weight."""
        self.weights[owner] = weight
        if len(self.weights) > 2 * _MAX_IDLE:
            for known in [known for known in self.weights if not self.is_active(known)][:_MAX_IDLE]:
                del self.weights[known]

    def take(self, owner: Owner, size: int) -> None:
        """A block of so many bytes more; `give`: one less."""
        self._bytes[owner] = self._bytes.get(owner, 0) + size

    def give(self, owner: Owner, size: int) -> None:
        self._bytes[owner] -= size
        if not self._bytes[owner]:
            del self._bytes[owner]
            if not self.is_active(owner):
                self._used_at.pop(owner, None)

    def first_to_go(self, limit_bytes: int, asking: Owner | None = None, size: int = 0) -> Set[Owner] | None:
        """Return whose blocks go first for `size` bytes of `asking`'s: those that have more than their share of the limit, or
        were not active lately. None: anybody's."""
        if len(self._bytes) < 2:
            return None
        active = {owner for owner in self._bytes if owner == asking or self.is_active(owner)}
        if asking is not None:
            active.add(asking)
        total = sum(self.weights.get(owner, 1.0) for owner in active)
        found: set[Owner] = set()
        for owner, used in self._bytes.items():
            more = size if owner == asking else 0
            if owner not in active or used + more > limit_bytes * self.weights.get(owner, 1.0) / total:
                found.add(owner)
        return found or None

    def is_active(self, owner: Owner) -> bool:
        """Return whether it used the store lately."""
        return self._clock() - self._used_at.get(owner, float("-inf")) < self._active_s
