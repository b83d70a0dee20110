"""A step of another worker that must have run before blocks can be copied: noticed without a message, in the copying thread.

The owner's segment has a word behind its generations, the number of the last step that has run (`Segment.progress`). Whoever
was told "these blocks are complete once step n has run" looks at the word: seldom while the step is not expected to end, often
around that time. The wait ends in any of four ways: the word has the number; a message says that the step has run (`told`); the
copy is given up (`told`, too); or it has taken longer than any step may. So neither an owner that dies nor a word that nobody
writes keeps a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common.protocol.errors import TransportUnavailable

PATIENCE_S = 20.0
"""Longest wait for a step. Its owner is lost sooner as a rule, and streams of which nothing is heard end after 30 s."""
NEAR_S = 0.002
"""How long before the expected end of a step, and behind it, the word is looked at often."""
OFTEN_S = 0.0001
SELDOM_S = 0.002


@dataclass(slots=True)
class Awaited:
    """`step`: of the owner. `ran`: reads the owner's word. `due_at`: when the step is expected to end, by `time.perf_counter`.
    `told`: set by whoever knows that there is nothing more to wait for."""

    step: int
    ran: Callable[[], int]
    due_at: float
    told: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Block until the step has run or `told` is set.

        :raises TransportUnavailable: neither happened in `PATIENCE_S`.
        """
        gives_up_at = time.perf_counter() + PATIENCE_S
        while self.ran() < self.step and not self.told.is_set():
            now = time.perf_counter()
            if now > gives_up_at:
                raise TransportUnavailable(f"step {self.step} of the owner has not run within {PATIENCE_S:g} s")
            early_s, late_s = self.due_at - NEAR_S - now, now - self.due_at
            if early_s > OFTEN_S:
                self.told.wait(early_s)
            elif late_s < NEAR_S:
                time.sleep(OFTEN_S)
            else:  # the estimate was wrong: the later it is, the less is lost by looking a little later
                self.told.wait(min(SELDOM_S, max(OFTEN_S, late_s / 50)))
