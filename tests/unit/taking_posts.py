"""A simulated engine whose rows take what is posted on a board when their step begins, as a GPU's do."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from common.engine.board import BOARD_SLOTS, ProposalBoard
from common.engine.outcomes import accept
from common.engine.plan import StepPlan, StepResult, StepRow, Taken, resolve_feeds
from common.engine.simulated.runner import SimulatedRunner
from common.ops.sampling.board_layout import BOARD_WORDS, LINE_TOKENS, LINES


class TakingRunner(SimulatedRunner):
    """`board`: as a device's runner has one. A step begins when the one before it has run: what is posted later is too late.
    `num_posted`: rows so far that took what was posted, if anything was.
    """

    num_posted = 0

    @property
    def board(self) -> ProposalBoard:
        found = getattr(self, "_board", None)
        if found is None:
            self._words = np.zeros((BOARD_SLOTS, BOARD_WORDS), np.int32)
            self._there = self._words.copy()
            self._chosen = dict[int, list[int]]()
            self._board = found = ProposalBoard(self._words)
        return found

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.board
        sampled, rows, before = self._sampled, list(plan.rows), self._chosen
        for index, row in enumerate(rows):
            if row.follows_device:
                rows[index] = msgspec.structs.replace(row, verified=before[row.board], tokens=[*row.tokens])
        resolved = resolve_feeds(StepPlan(plan.step, rows), sampled)
        self._chosen = {}
        taken = [self._take(row, done, sampled) for row, done in zip(rows, resolved, strict=True)]
        samples = self._run(resolved) if resolved else []
        for one, found in zip(samples, taken, strict=True):
            one.taken = found
        self._sampled = [token for one in samples for token in one.tokens]
        self._there = self._words.copy()
        return StepResult(rows=samples)

    def _take(self, row: StepRow, resolved: StepRow, sampled: Sequence[int]) -> Taken | None:
        if not row.is_posted:
            return None
        assert row.feed >= 0
        self.num_posted += 1
        came = sampled[row.feed : row.feed + accept(row.verified, sampled[row.feed :]) + 1]
        start, *words = self._there[row.board].tolist()
        behind: list[int] = []
        for number, length in enumerate(words[:LINES]):
            begin = LINES + number * LINE_TOKENS
            line = words[begin : begin + length]
            if start == row.start and line[: len(came)] == came and length - len(came) > len(behind):
                behind = line[len(came) :]
        taken = behind[: row.room]
        resolved.tokens[1 : 1 + len(taken)] = taken
        self._chosen[row.board] = taken
        return Taken(taken, len(behind))
