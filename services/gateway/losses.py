"""Whether a request may be what ends workers. Pure.

A worker that dies takes everything along that it held, and nearly all of that is innocent. What tells a request that kills is
that its worker died before giving a single token of it: it is suspected then, and runs where nobody else does until it has
given one. A worker that had given tokens of it clears it, once: a request may kill in the middle of its answer, but then it
kills the next worker, which begins where the last one ended, with its first step.
"""

from __future__ import annotations

from enum import IntEnum


class Suspicion(IntEnum):
    """NONE: it runs anywhere. SOME: alone, if a worker can be had soon. STRONG: alone, or not at all."""

    NONE = 0
    SOME = 1
    STRONG = 2


class Losses:
    """Workers lost in a row with the request on them, each of them before it had given a token of it, but for the first."""

    def __init__(self) -> None:
        self.count = 0
        self.suspicion = Suspicion.NONE

    def lost(self, *, produced: int) -> None:
        """A worker is gone that had given `produced` tokens of the request since it took it."""
        if produced:
            self.count, self.suspicion = 1, Suspicion.NONE
        else:
            self.count += 1
            self.suspicion = Suspicion.SOME if self.count == 1 else Suspicion.STRONG

    def produced(self) -> None:
        """A token came: it does not kill the worker that has it now, as far as one can tell."""
        self.suspicion = Suspicion.NONE
