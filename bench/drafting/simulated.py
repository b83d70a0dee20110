"""What draft workers with a model would give for other times of steps: `python -m bench.drafting.simulated`.

    python -m bench.drafting.simulated --streams 1,4,8 --draft-ms 1.2,0.8
    python -m bench.drafting.simulated --streams 1 --no-cadence

The draft worker's own planning (`services/draft/drafting.py`, `branches.py`, `cadence.py`) and the decode worker's own book
(`services/decode/speculation.py`) in simulated time, without engines, processes or a bus: a target whose steps take
--target-ms, a draft model whose steps take --draft-ms one after the other, two in flight, and messages that take --message-ms.
The target's next step takes what has come --margin-ms before the one that runs ends. Texts count; the draft model is right
behind --percent of all tokens, and its second choice is behind half of the others.

Columns: tokens per second over those without proposals; steps that verify something; tokens accepted of those, and by step that
verifies; time from a draft step to the next; its rows; draft steps with the rows of the one before, one token further, of which
the host of a GPU has nothing to say.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.common.table import markdown
from bench.drafting.counting import BLOCK_TOKENS, VERIFIED, VOCAB, Counts, choices, draft_book, samples, texts
from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.cache.retention import KEEP_ALL
from common.engine.outcomes import proposal_behind, width_of
from common.engine.plan import RowSamples, StepPlan, StepResult, StepRow
from common.protocol.draft_messages import DraftRow, DraftUpdate, Proposals
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from services.draft.cadence import Cadence
from services.draft.drafting import Drafter
from services.draft.model_actor import STAY_TOKENS
from services.draft.proposer import MirrorKey

DRAFT, DECODE = WorkerRef("draft", "draft-0", 1), WorkerRef("decode", "decode-0", 1)
DRAFTED, BRANCHES, BRANCH_TOKENS = 16, 6, 8
VERIFIED_MS = 0.02
"""What a verified token adds to the target's step."""
DRAFTED_MS = 0.004
"""What a token adds to a draft step."""
WARM_UP = 200
"""Steps that are not counted."""


@dataclass(frozen=True)
class Times:
    """Milliseconds."""

    target: float
    draft: float
    message: float
    margin: float


class Clock:
    """Calls in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = itertools.count()

    def at(self, moment: float, call: Callable[..., object], *arguments: Any) -> None:
        heapq.heappush(self._calls, (moment, next(self._number), call, arguments))

    def step(self) -> None:
        self.now, _, call, arguments = heapq.heappop(self._calls)
        call(*arguments)


class Draft:
    """The draft worker. send: what it says to the decode worker."""

    def __init__(self, clock: Clock, times: Times, percent: float, streams: int, *, with_cadence: bool) -> None:
        self.send: Callable[[Proposals], object]
        self.num_steps = self.num_rows = self.num_continued = 0
        self._clock, self._times, self._percent = clock, times, percent
        self._cadence = Cadence() if with_cadence else None
        self._drafter = Drafter(
            GroupedPool(PoolGroup(BlockPool(4096 * streams, BLOCK_TOKENS), KEEP_ALL)),
            max_sequences=streams * (1 + BRANCHES) + 8,
            max_drafted=DRAFTED,
            stay_tokens=STAY_TOKENS,
            token_budget=2048,
            max_context=VOCAB,
            vocab_size=VOCAB,
            num_branches=BRANCHES,
            branch_tokens=BRANCH_TOKENS,
        )
        self._air: deque[StepPlan] = deque()
        self._free_at = 0.0
        self._samples: list[int] = []
        self._planned: Sequence[StepRow] = ()

    def hear(self, update: DraftUpdate) -> None:
        if self._cadence is not None:
            self._cadence.heard(DECODE, self._clock.now)
        for row in update.rows:
            self._drafter.update((DECODE, row.sequence), row.base, row.tokens, update.sampling.get(row.sequence))
        self._go_on([(DECODE, row.sequence) for row in update.rows])

    def _go_on(self, fresh: Sequence[MirrorKey]) -> None:
        """As `ModelDraftActor.work`: say what is drafted, and start steps."""
        drafter, now = self._drafter, self._clock.now
        tables = {key[1]: table for key in fresh if (table := drafter.table(key))}
        guesses = zip(fresh, drafter.propose(fresh, DRAFTED), strict=True)
        rows = [DraftRow(sequence=key[1], base=drafter.length(key), tokens=guess) for key, guess in guesses if guess]
        if rows:
            self._clock.at(now + self._times.message, self.send, Proposals(draft=DRAFT, rows=rows, tables=tables))
        while len(self._air) < 2:
            if self._air and self._cadence is not None and self._cadence.is_due(self._free_at, now):
                break
            if (plan := drafter.plan()) is None:
                break
            self._free_at = max(now, self._free_at) + self._times.draft + DRAFTED_MS * plan.num_tokens
            self._air.append(plan)
            self.num_continued += continues(plan, self._planned)
            self._planned = plan.rows
            self.num_steps, self.num_rows = self.num_steps + 1, self.num_rows + len(plan.rows)
            self._clock.at(self._free_at, self._land)

    def _land(self) -> None:
        plan = self._air.popleft()
        drawn: list[int] = []
        rows: list[RowSamples] = []
        for row in plan.rows:
            last = self._samples[row.feed] if row.feed >= 0 and len(row.tokens) == 1 else row.tokens[-1]
            found = RowSamples(tokens=[])
            if row.num_samples:
                found = samples(*choices(last, self._percent), with_logprobs=True)
                drawn += found.tokens
            rows.append(found)
        self._samples = drawn
        self._go_on(self._drafter.commit(plan, StepResult(rows=rows, elapsed_s=0.0)))


def continues(plan: StepPlan, before: Sequence[StepRow]) -> bool:
    """Whether a step has the rows `before`, each one token further."""
    is_same = len(plan.rows) == len(before) and not plan.copies
    return is_same and all(row.feed == index and len(row.tokens) == 1 for index, row in enumerate(plan.rows))


class Target:
    """The decode worker."""

    def __init__(self, clock: Clock, times: Times, draft: Draft, streams: int) -> None:
        self.counts = Counts()
        self._clock, self._times, self._draft = clock, times, draft
        self._book = draft_book(lambda size: 1e-3 * self._step_ms(size))
        self._book.set_workers([Presence(worker=DRAFT, state="ready", model="m", credits=streams)])
        draft.send = self._book.on_proposals
        self._texts = texts(streams)
        for name, text in self._texts.items():
            self._book.open(name, text)
        self._verifying: dict[str, list[int]] = {}
        self._planned: dict[str, list[Any]] = {}

    def _step_ms(self, num_tokens: int) -> float:
        return self._times.target + VERIFIED_MS * num_tokens

    def plan(self) -> None:
        """What the next step takes, while one runs."""
        self._book.begin_step(len(self._texts))
        for name in self._texts:
            self._planned[name] = self._book.foresee(name, self._verifying.get(name, []), VERIFIED)

    def end(self) -> None:
        """A step has run; the next one begins."""
        accepted = self.counts.end_step(self._book, self._texts, self._verifying)
        self._verifying = {
            name: proposal_behind(self._planned.get(name, []), accepted[name], text[-1]) for name, text in self._texts.items()
        }
        size = len(self._texts) + sum(map(width_of, self._planned.values()))
        ends = self._clock.now + self._step_ms(size)
        for _, message in self._book.messages(DECODE):
            assert isinstance(message, DraftUpdate)
            self._clock.at(self._clock.now + self._times.message, self._draft.hear, message)
        self._planned = {}
        self._clock.at(ends - self._times.margin, self.plan)
        self._clock.at(ends, self.end)


def simulate(streams: int, percent: float, times: Times, steps: int, *, with_cadence: bool) -> list[str]:
    """Return a row of the table."""
    clock = Clock()
    draft = Draft(clock, times, percent, streams, with_cadence=with_cadence)
    target = Target(clock, times, draft, streams)
    clock.at(0.0, target.end)

    while target.counts.steps < WARM_UP:
        clock.step()
    target.counts, began = Counts(), clock.now
    draft_steps, draft_rows, continued = draft.num_steps, draft.num_rows, draft.num_continued
    while target.counts.steps < steps:
        clock.step()
    elapsed, draft_steps, draft_rows = clock.now - began, draft.num_steps - draft_steps, draft.num_rows - draft_rows
    return [
        str(streams),
        f"{times.draft:g}",
        *target.counts.cells(streams, elapsed, times.target + VERIFIED_MS * streams),
        f"{elapsed / max(1, draft_steps):.2f}",
        f"{draft_rows / max(1, draft_steps):.1f}",
        f"{(draft.num_continued - continued) / max(1, draft_steps):.0%}",
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.drafting.simulated", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--draft-ms", default="1.2")
    parser.add_argument("--percent", type=float, default=80)
    parser.add_argument("--target-ms", type=float, default=5.6)
    parser.add_argument("--message-ms", type=float, default=0.6)
    parser.add_argument("--margin-ms", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--no-cadence", action="store_true", help="draft steps are two in flight whatever is about to come")
    options = parser.parse_args(argv)
    rows = [
        simulate(
            int(streams),
            options.percent,
            Times(options.target_ms, float(draft_ms), options.message_ms, options.margin_ms),
            options.steps,
            with_cadence=not options.no_cadence,
        )
        for streams in options.streams.split(",")
        for draft_ms in options.draft_ms.split(",")
    ]
    print(markdown(["streams", "draft step, ms", "of off", "verify", "accepted", "each, ms", "rows", "same rows"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
