"""What lookup in a GPU's steps is worth to a row: whether its text is searched, and how much is verified. Pure.

    chances ─► planned ─► … the step runs, searches the row's text and verifies what is found … ─► record

A row's width is planned before anybody knows whether its text has a match: what is planned costs its share of the step even if
nothing is proposed. So the host goes by the last search that it knows of, which is two steps old where the engine is a step
ahead. A copy that held so far goes on as a rule; a text without a match has none in the next step. How often that is so is
measured by the length of the match (`hit_rates`), whether it was verified or not.

A text is searched in every step, with no room, while nothing is found in it: that takes microseconds. One in which nothing
was found for long pauses, and costs nothing; what it grows by meanwhile is sent when it is searched again. With hundreds of
rows these microseconds add up to a millisecond or two of each step: then texts pause sooner, and for longer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from common.engine.outcomes import accept
from common.engine.plan import LookedUp
from common.engine.sequence import Sequence
from services.decode.hit_rates import HitRates, Record
from services.decode.speculation_policy import SpeculationPolicy

MAX_ROOM = 32
"""Tokens that a device looks up for a row, at most."""
_PATIENCE = 64
"""Tokens without a match before a pause."""
_FIRST_NAP = 16
_MAX_NAP = 64
"""Tokens that a text pauses, at first and at most. A copy that begins meanwhile is found so much later."""
_UNKNOWN_CHANCE = 0.01
"""Of a token behind no match, where all is verified anyway."""
_MANY_ROWS = 64
"""Rows from which on texts pause sooner, and for longer, in proportion to their number."""
_MOST_HASTE = 4.0
"""Times as soon and as long, at most."""
_NONE = -1


@dataclass(slots=True)
class _Text:
    """bucket: the class of the match that the next row may go on with, `_NONE` if there is none; ladder: the chances of its
    tokens. planned: the classes of the rows in flight, oldest first, from the first that has one on. idle: tokens since
    something held, times the haste of the steps; wakes_at: the number of the sequence's tokens at which a pause ends; nap: how
    long the next one is. first, later: how the row's own first and later tokens did."""

    bucket: int = _NONE
    ladder: list[float] = field(default_factory=list)
    planned: deque[int] = field(default_factory=deque)
    idle: float = 0.0
    wakes_at: int = 0
    nap: int = _FIRST_NAP
    first: Record = field(default_factory=Record)
    later: Record = field(default_factory=Record)


class DeviceLookup:
    """policy: whose prices the chances are for."""

    name = "lookup"

    def __init__(self, policy: SpeculationPolicy) -> None:
        self.policy = policy
        self._first, self._later = HitRates(), HitRates()
        self._texts: dict[str, _Text] = {}
        self._hopeful: set[str] = set()
        self._haste = 1.0

    def begin_step(self, num_rows: int) -> None:
        """A step with `num_rows` decoding rows is about to be planned."""
        self._haste = min(max(1.0, num_rows / _MANY_ROWS), _MOST_HASTE)

    def open(self, sequence: Sequence) -> None:
        self._texts[sequence.request] = _Text()

    def close(self, sequence: Sequence) -> None:
        """Harmless twice."""
        self._texts.pop(sequence.request, None)
        self._hopeful.discard(sequence.request)

    def reset(self) -> None:
        self._texts.clear()
        self._hopeful.clear()

    def is_awake(self, sequence: Sequence) -> bool:
        """Whether the sequence's text is searched in the step that is planned."""
        return self.chances(sequence) is not None

    def chances(self, sequence: Sequence) -> list[float] | None:
        """Return the chance of each token that a row may look up, that it is found, and holds with all before it; [] where
        nothing is to be expected, None where the text is not searched."""
        text = self._texts.get(sequence.generation.request)
        return None if text is None or len(sequence.tokens) < text.wakes_at else text.ladder

    def expects(self, request: str) -> bool:
        """Whether something was found for the sequence that its next rows may go on with: then a step that did not search its
        text is to be recorded, too."""
        return request in self._hopeful

    def planned(self, sequence: Sequence) -> None:
        """The step that is planned searches the sequence's text."""
        text = self._texts[sequence.request]
        if text.planned or text.bucket != _NONE:
            text.planned.append(text.bucket)

    def record(self, sequence: Sequence, start: int, found: LookedUp | None) -> None:
        """A step has run for the sequence: it has new tokens from output index `start` on, and this was found behind those
        before them. None: the text was not searched."""
        text = self._texts.get(sequence.request)
        if text is None:
            return
        if found is not None and not found.length and not text.planned and not text.ladder:  # as a rule, where there are many
            self._idle(text, sequence, sequence.num_outputs - start)
            return
        if found is None:
            text.planned.clear()
            self._expect(text, _NONE, 0)
            self._hopeful.discard(sequence.request)
            return
        came = sequence.tokens[sequence.generation.prompt_tokens + start :]
        bucket = _NONE
        while len(text.planned) > sequence.num_awaited:  # more than one: those before are of steps that failed
            bucket = text.planned.popleft()
        hits = accept(found.tokens, came)
        if bucket != _NONE and came:
            self._first.record(bucket, hits > 0, text.first)
        for place in range(1, min(len(came), len(found.tokens), hits + 1)):
            self._later.record(self._bucket(found, place, place), place < hits, text.later)
        if hits and hits == min(len(came), len(found.tokens)):
            text.idle, text.nap = 0.0, _FIRST_NAP
            self._expect(text, self._bucket(found, hits, 0), found.length + hits)
            self._hopeful.add(sequence.request)
            return
        self._expect(text, _NONE, 0)
        if not text.planned:
            self._hopeful.discard(sequence.request)
        self._idle(text, sequence, len(came))

    def _idle(self, text: _Text, sequence: Sequence, num_tokens: int) -> None:
        """Nothing held for so many tokens more."""
        text.idle += num_tokens * self._haste
        if text.idle >= _PATIENCE and not self.policy.always:
            text.idle = _PATIENCE / 2  # behind a pause it is searched for half as long
            text.wakes_at = len(sequence.tokens) + int(text.nap * self._haste)
            text.nap = min(2 * text.nap, _MAX_NAP)

    def _bucket(self, found: LookedUp, num_more: int, place: int) -> int:
        """Return the class of a match that has gone on for `num_more` tokens, for the token at that place of a proposal: behind
        the first one, what other occurrences say does not count."""
        agreeing = found.num_found if place else found.num_agreeing
        return self._first.bucket(found.length + num_more, agreeing, found.num_found, shared=False)

    def _expect(self, text: _Text, bucket: int, length: int) -> None:
        text.bucket = bucket
        most = min(MAX_ROOM, self.policy.max_tokens)
        if bucket == _NONE:
            text.ladder = [_UNKNOWN_CHANCE] * most if self.policy.always else []
            return
        ladder = [self._first.chance(bucket, text.first)]
        for place in range(1, most):
            later = self._later.bucket(length + place, 1, 1, shared=False)
            ladder.append(ladder[-1] * self._later.chance(later, text.later))
        text.ladder = ladder
