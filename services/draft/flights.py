"""Steps of a draft model that are planned and not committed yet, and what they compute of each text. Pure.

With a runner that runs ahead, the next step is planned before the last one's tokens are known: a row is then fed with the
sample of that step. An update may come meanwhile that says otherwise. What is on its way then is void: it runs, and its results
are passed over. What it has written lies behind the text's valid KV, and later steps, which run behind it, write there again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.engine.plan import BlockCopy, StepPlan
from services.draft.mirror import Branch, Mirror


@dataclass(slots=True)
class Entry:
    """A row of a step. It holds while `era` is that of what it computes."""

    line: Mirror | Branch
    era: int

    @property
    def holds(self) -> bool:
        return not self.line.is_closed and self.era == self.line.air.era


@dataclass(slots=True)
class Flight:
    """A step, number `step`, whose samples are those of `rows` with any, in order. copies: see `StepPlan`."""

    step: int
    entries: list[Entry] = field(default_factory=list)
    num_samples: int = 0
    copies: list[BlockCopy] = field(default_factory=list)


class Flights:
    """`planning`: the step that rows are added to now."""

    def __init__(self) -> None:
        self.planning = Flight(0)
        self._air: deque[Flight] = deque()

    def __bool__(self) -> bool:
        return bool(self._air or self.planning.entries)

    def __iter__(self) -> Iterator[Entry]:
        for flight in (*self._air, self.planning):
            yield from flight.entries

    def begin(self) -> None:
        """A step is about to be planned."""
        self.planning = Flight(self.planning.step + 1)

    def launch(self) -> bool:
        """The step has its rows. Return whether there are any: else there is no such step."""
        flight = self.planning
        if flight.entries:
            self._air.append(flight)
        self.planning = Flight(flight.step if flight.entries else flight.step - 1)
        return bool(flight.entries)

    def land(self, plan: StepPlan) -> Flight:
        """The oldest step has run."""
        flight = self._air.popleft()
        assert flight.step == plan.step, "steps are committed in the order in which they were planned"
        for entry in flight.entries:
            entry.line.air.num_steps -= 1
        return flight

    def fail(self) -> list[Mirror]:
        """No step in the air will end. Return the mirrors that were in them."""
        mirrors: dict[Mirror, None] = {}
        for entry in self:
            line = entry.line
            line.air.num_steps = 0
            line.air.void()
            mirrors[line.mirror if isinstance(line, Branch) else line] = None
        self._air.clear()
        self.planning = Flight(self.planning.step)
        return list(mirrors)

    def add(self, line: Mirror | Branch, end: int, *, sampled: bool) -> int:
        """The step that is planned computes the line's tokens up to index `end`, and samples the next one if `sampled`.

        Returns the sample of the step before that is its first token, -1 if that is known.
        """
        air, flight = line.air, self.planning
        feed = air.sample if air.step == flight.step - 1 and end > line.end else -1
        air.place = len(flight.entries)
        flight.entries.append(Entry(line, air.era))
        air.num_steps += 1
        air.step = air.last = flight.step
        air.end = end
        air.sample = flight.num_samples if sampled else -1
        flight.num_samples += sampled
        return feed

    def pending(self, line: Mirror | Branch) -> int:
        """Return how many of the line's tokens the step that is planned could compute: 1 where that is one which the step
        before samples; 0 where it is one of a step before that, or is computed already."""
        known = line.end - line.begin
        if known > 0:
            return known
        return int(line.air.sample >= 0 and line.air.step == self.planning.step - 1)

    def take_over(self, branch: Branch, mirror: Mirror) -> None:
        """What is on its way for the branch is on its way for the mirror, which has its text and tables now."""
        for entry in self:
            if entry.line is branch and entry.holds:
                entry.line, entry.era = mirror, mirror.air.era
                branch.air.num_steps -= 1
                mirror.air.num_steps += 1
        mirror.air.last = max(mirror.air.last, branch.air.last)
        mirror.air.step, mirror.air.end, mirror.air.sample = branch.air.step, branch.air.end, branch.air.sample


def in_places(places: Sequence[int]) -> list[int]:
    """Return an order of texts in which as many as can be have the row that they had in the last step: a step with the same
    rows as the one before costs the host less. places: that row of each text, -1 for none."""
    order = [-1] * len(places)
    others: list[int] = []
    for index, place in enumerate(places):
        if 0 <= place < len(order) and order[place] < 0:
            order[place] = index
        else:
            others.append(index)
    rest = iter(others)
    return [index if index >= 0 else next(rest) for index in order]
