"""What proposes tokens in the decode process, next to draft workers: the interface. Pure.

    open ─► each step: guess or foresee ─► … the step runs … ─► record ─► close

The head of `head_drafts` reads hidden states of the target and runs with the engine's step: its tokens come with the step's
result, and `guess` returns them. Where the engine is a step ahead, it hands them to the next step on the device, and is none of
these (`device_head`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from common.engine.outcomes import Outcome
from common.engine.plan import Drafted
from common.engine.sequence import Sequence


class Guess(NamedTuple):
    """`tokens` may follow. chances[k]: that all up to number k do."""

    tokens: list[int]
    chances: list[float]


class Foreseen(NamedTuple):
    """`outcomes` of the step in flight. chances[k]: that one of them comes true and then proposes k + 1 right tokens."""

    outcomes: list[Outcome]
    chances: list[float]


NO_GUESS = Guess([], [])
NOTHING_FORESEEN = Foreseen([], [])


class Drafter(Protocol):
    """A sequence that it does not know has no guess."""

    name: str

    def open(self, sequence: Sequence) -> None:
        """Begin to guess for a sequence, whose tokens grow outside."""
        ...

    def guess(self, sequence: Sequence, limit: int) -> Guess:
        """Return at most `limit` tokens that may follow those of the sequence."""
        ...

    def foresee(self, sequence: Sequence, limit: int) -> Foreseen:
        """Return at most `limit` tokens for each likely outcome of the step in flight, which verifies `sequence.verifying`."""
        ...

    def record(self, sequence: Sequence, drafted: Drafted | None = None) -> None:
        """A step has run for the sequence; its tokens are there. Whatever was guessed can be compared with them.

        drafted: by the engine's head in that step, for the next one.
        """
        ...

    def close(self, sequence: Sequence) -> None:
        """Harmless twice."""
        ...

    def tidy(self) -> None:
        """Do a bounded amount of work that can wait; called while a step runs."""
        ...

    def reset(self) -> None:
        """Forget all sequences and texts."""
        ...
