"""What draft workers propose, posted on the engine's board until the step that verifies it begins. Pure.

    chances ─► room ─► … proposals: post, post … the step runs and says what it took ─► record ─► …

A row of a step that is planned a step ahead is planned before most of what it could verify has come. So it is given room, and
takes what is posted when the step before it has ended. How much that will be is known from the steps before: how often so many
tokens were there, and how often they held. What is posted is about the sequence's tokens that are known here; what the step in
flight samples behind them, the device finds in the lines itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.engine.board import ProposalBoard
from common.engine.plan import Taken
from common.engine.sequence import Sequence
from common.ops.sampling.board_layout import LINE_TOKENS
from services.decode.speculation import DraftBook

_WEIGHT = 0.1
"""Of a step in how often so many tokens are there."""


@dataclass(slots=True)
class _Posted:
    """there[k]: how often k + 1 tokens were there to verify, lately."""

    sequence: Sequence
    there: list[float] = field(default_factory=lambda: [1.0] * (LINE_TOKENS - 1))


class Posting:
    """Sequences whose rows take what draft workers propose from `board`, as long as few are mirrored.

    `close` a sequence that is not decoded any more; harmless twice.
    """

    def __init__(self, board: ProposalBoard, drafts: DraftBook) -> None:
        self._board = board
        self._drafts = drafts
        self._posted: dict[str, _Posted] = {}

    def chances(self, sequence: Sequence) -> list[float]:
        """Return the chance of each token that a row planned now could take, that it is there, and holds with all before it;
        [] where nothing is to be expected, or the row has no slot."""
        if not sequence.num_awaited or not sequence.may_be_open:
            return []
        rate = self._drafts.rate_of(sequence.request)
        if not rate or not self._open(sequence):
            return []
        there = self._posted[sequence.request].there
        return [share * rate ** (place + 1) for place, share in enumerate(there)]

    def _open(self, sequence: Sequence) -> bool:
        if sequence.board < 0:
            sequence.board = self._board.take()
            if sequence.board < 0:
                return False
            if (earlier := self._posted.get(sequence.request)) is not None:  # another attempt at the request
                self.close(earlier.sequence)
            self._posted[sequence.request] = _Posted(sequence)
            self.post(sequence.request)
        return True

    def post(self, request: str) -> None:
        """What is proposed for the sequence has changed, or its tokens have."""
        posted = self._posted.get(request)
        if posted is not None:
            self._board.post(posted.sequence.board, len(posted.sequence.tokens), self._drafts.lines(request))

    def record(self, sequence: Sequence, taken: Taken | None) -> None:
        """A step has run for the sequence, and its tokens are there. taken: None for a row that took nothing from the board."""
        posted = self._posted.get(sequence.request)
        if posted is None:
            return
        if taken is not None:
            posted.there = [share + _WEIGHT * ((place < taken.num_there) - share) for place, share in enumerate(posted.there)]
        self.post(sequence.request)

    def close(self, sequence: Sequence) -> None:
        posted = self._posted.get(sequence.request)
        if posted is not None and posted.sequence is sequence:
            del self._posted[sequence.request]
            self._board.give_back(sequence.board)
            sequence.board = -1

    def reset(self) -> None:
        """Forget everything."""
        for posted in list(self._posted.values()):
            self.close(posted.sequence)
