"""What the load's requests came to: how many of each kind, and everything that must not be, in words."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

MAX_KEPT = 40
MAX_CHARACTERS = 600


@dataclass
class Tally:
    """`wrong`: things that must not be, the first ones in words in `faults`. `answered`: by kind of request and edge."""

    began: float = field(default_factory=time.monotonic)
    answered: Counter[str] = field(default_factory=Counter)
    by_edge: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    salts: Counter[str] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)

    def fault(self, kind: str, detail: str) -> None:
        """Note what must not be."""
        self.wrong[kind] += 1
        if len(self.faults) < MAX_KEPT:
            self.faults.append(f"{time.monotonic() - self.began:.1f} s: {kind}: {detail}"[:MAX_CHARACTERS])

    @property
    def num_answered(self) -> int:
        return self.answered.total()


@dataclass(frozen=True)
class End:
    """When the load is over: at `until` (monotonic seconds), or once `requests` were answered; 0: then by time alone."""

    tally: Tally
    until: float
    requests: int = 0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until or 0 < self.requests <= self.tally.num_answered
