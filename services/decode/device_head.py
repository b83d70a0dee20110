"""Drafts of a head in a GPU's steps: behind which rows, how many, and how many of them a row verifies. Pure.

    begin_step: how many tokens behind each row ─► the step runs, the head behind it, which posts what it drafts on the device
    chances ─► room of the next row ─► … that step takes what is posted, and verifies it ─► record: how much of it held

The engine is a step ahead, so nobody knows what is drafted when a row gets its room: how often drafts hold is known by their
place. All rows that are drafted for get the same number of tokens, for a pass computes a token of each. The head's time is
measured like a step's, and it drafts where that gives more tokens per second. Where it does not pay, nobody is drafted for, and
for a sequence whose tokens hold too seldom it pauses; twice as long each time. Then a few short drafts show whether that has
changed (`num_probes`): a few, since the head knows nothing of a text behind a pause, and since times are forgotten, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field

import numpy as np

from common.engine.board import HEAD_SLOTS, HeadSlots
from common.engine.plan import DraftPass, Taken
from common.engine.sequence import Sequence
from common.ops.sampling.board_layout import LINE_TOKENS
from services.decode.hit_rates import RateTable, Record
from services.decode.speculation_policy import Pick, SpeculationPolicy
from services.decode.step_costs import StepCosts

_MARGIN = 1.03
"""Times the tokens per second without the head: less may be noise."""
_FIRST_RATE = 0.6
"""Of a place of a proposal."""
_PLACES = 8
"""Of a proposal that are told apart."""
_FIRST_NAP = 16
_MAX_NAP = 512
"""Tokens that a sequence pauses, or steps that all do, at first and at most."""
_MOST = LINE_TOKENS - 1
"""Tokens that a line of the board has room for, behind what the step sampled."""
_PROBE_TOKENS = 2
_PROBE_STEPS = 8
_MEASURED_AFTER = 5
"""Steps of a trial after which it may end: what its steps cost was forgotten in a long pause."""
_NEARLY = 0.95
"""Of the tokens per second without the head: what would give as many is soon tried again."""
_HOPELESS = 0.3
"""Below this chance of a first token a pause is twice as long as the one before."""
_TRIALS_SHARE = 0.01
"""Of the time, for trials where it does not pay."""
_PICKED_STEPS = 8
"""For which a depth is kept, if as many rows are decoded."""
CONTEXT_TOKENS = 64
"""Tokens at the end of a prompt that was computed elsewhere which are recomputed for their hidden states (decision 0102)."""
_MIN_OUTPUT_TOKENS = 16
"""Fewest output tokens left for which recomputing them pays."""
_NOBODY = -1


@dataclass(slots=True)
class _Text:
    """asleep: tokens until its own pause ends; nap: how long the next one is. probes: steps left of a trial behind it.

    wanted: tokens to draft behind the row that is planned; coming: behind the row planned last. known: tokens that the text had
    after the last step.
    """

    sequence: Sequence
    known: int
    nap: int = _FIRST_NAP
    asleep: int = 0
    probes: int = 0
    wanted: int = 0
    coming: int = 0
    by_place: Record = field(default_factory=Record)


class DeviceHeadDrafts:
    """policy: its costs are those of steps without the head. slots: of the engine's board, for whom the head can draft.
    `most`: tokens that are drafted at most. `first_costs`, `later_costs`: of the head's first pass behind a step, and of the
    others, by their tokens."""

    name = "head"

    def __init__(self, policy: SpeculationPolicy, slots: HeadSlots) -> None:
        self.policy = policy
        self.most = min(policy.max_tokens, _MOST)
        self.num_probes = 0
        self.num_drafted = 0
        self.num_invalid = 0
        self.seconds = 0.0
        self._slots = slots
        self.first_costs, self.later_costs = StepCosts(), StepCosts()
        self._by_place = RateTable([_FIRST_RATE] * _PLACES)
        self._texts: dict[str, _Text] = {}
        self._depth = 1
        self._pays = self._wants = True
        self._steps = 0
        self._picked: tuple[tuple[int, int], int, Pick] | None = None
        """Rows and sequences that may be drafted for, the step until which a pick for these is good, and the pick."""
        self._nap, self._trial, self._rest = _FIRST_NAP, 0, 0
        """Where it does not pay: steps of the next pause, and steps that are left of a trial, and of a pause."""
        self._owed_s = self._alone_s = 0.0
        """What trials have taken, less their share of the time since; and what a step without drafts takes."""

    @property
    def num_sequences(self) -> int:
        return len(self._texts)

    @property
    def is_resting(self) -> bool:
        """Whether nothing is wanted of it: it does not pay now."""
        return not self._pays and not self._trial and not self.policy.always

    def open(self, sequence: Sequence) -> None:
        self.close(sequence)
        slot = self._slots.take()
        if slot >= 0:
            sequence.board = slot
            text = self._texts[sequence.request] = _Text(sequence, len(sequence.tokens))
            text.wanted = self._depth if self._pays else 0  # behind a prompt that is computed here

    def recompute(self, sequence: Sequence) -> int:
        """Return how many of the sequence's last tokens to compute although their KV was copied here; 0: none. The head reads
        hidden states, which a hand-off does not carry."""
        text = self._texts.get(sequence.request)
        left = sequence.sampling.max_tokens - sequence.num_outputs
        is_drafted = text is not None and text.wanted > 0 and sequence.may_be_open
        return CONTEXT_TOKENS if is_drafted and left >= _MIN_OUTPUT_TOKENS else 0

    def close(self, sequence: Sequence) -> None:
        """Harmless twice."""
        text = self._texts.pop(sequence.request, None)
        if text is not None:
            self._slots.give_back(text.sequence.board)
            text.sequence.board = _NOBODY

    def reset(self) -> None:
        for text in list(self._texts.values()):
            self.close(text.sequence)

    def chances(self, sequence: Sequence) -> list[float]:
        """Return the chance of each token that a row planned now could take, that it holds with all before it; [] for none."""
        text = self._texts.get(sequence.request)
        if text is None or not text.coming or not sequence.num_awaited or not sequence.may_be_open:
            return []
        return self._by_place.ladder(self.most, text.by_place)[: text.coming]

    def begin_step(self, decoding: Sized[Sequence], others: Mapping[str, float]) -> None:
        """Decide how many tokens are drafted behind each row of a step that decodes these.

        others: how many tokens other drafters' offers for this step are expected to give. Who copies now will copy on.
        """
        self._steps += 1
        if self.is_resting:
            self._want_nothing()
            self._rest = max(0, self._rest - 1)
            self._owed_s = max(0.0, self._owed_s - _TRIALS_SHARE * self._alone_s)
            self._trial = 0 if self._rest or self._owed_s else _PROBE_STEPS
            return
        self._wants = True
        texts = {sequence.request: self._texts[sequence.request] for sequence in decoding if sequence.request in self._texts}
        for text in texts.values():
            text.wanted = 0
        num_rows = len(decoding)
        if not texts or num_rows > HEAD_SLOTS or num_rows >= self.policy.max_step_tokens:
            return
        if self.policy.always:
            for text in texts.values():
                text.wanted = self.most
            return
        ladders = {
            request: ladder
            for request, text in texts.items()
            if text.sequence.may_be_open
            and others.get(request, 0.0) <= sum(ladder := self._by_place.ladder(self.most, text.by_place))
        }
        if not ladders or not self.policy.costs.is_known(num_rows):
            return  # such a step is measured without drafts: planning those takes the host longer, too
        if self._trial:
            self._try([texts[request] for request in ladders], num_rows)
            if self._trial > _PROBE_STEPS - _MEASURED_AFTER:
                return
        best = self._best(num_rows, ladders)
        gain = best.pace / best.plain_pace
        self._pays = gain > _MARGIN
        if self._pays:
            self._nap, self._trial = _FIRST_NAP, 0
            for request, ladder in ladders.items():
                self._choose(texts[request], ladder[0] >= best.price)
        elif not self._trial:
            self._rest = self._nap
            is_near = gain > _NEARLY and max(ladder[0] for ladder in ladders.values()) > _HOPELESS
            self._nap = _FIRST_NAP if is_near else min(2 * self._nap, _MAX_NAP)

    def _want_nothing(self) -> None:
        """While it rests, this must cost hardly anything."""
        if self._wants:
            for text in self._texts.values():
                text.wanted = 0
            self._wants = False

    def _try(self, texts: Sized[_Text], num_rows: int) -> None:
        """A step of a trial: for all of `texts`."""
        self._trial -= 1
        self.num_probes += len(texts)
        for text in texts:
            text.wanted = min(self.most, _PROBE_TOKENS)
        sizes = np.array([num_rows, num_rows + _PROBE_TOKENS * len(texts)])
        self._alone_s, tried_s = (float(seconds) for seconds in self.policy.costs.seconds(sizes))
        self._owed_s += tried_s - self._alone_s
        self._owed_s += self.first_costs.seconds_if_known(len(texts)) + self.later_costs.seconds_if_known(len(texts))

    def _choose(self, text: _Text, is_worth_it: bool) -> None:
        """Draft for a text or let it pause, where the head pays for others."""
        if is_worth_it:
            text.wanted, text.nap, text.probes, text.asleep = self._depth, _FIRST_NAP, _PROBE_STEPS, 0
        elif not text.asleep and text.probes:
            text.probes -= 1
            self.num_probes += 1
            text.wanted = min(self._depth, _PROBE_TOKENS)
        elif not text.asleep:
            text.asleep, text.probes, text.nap = text.nap, _PROBE_STEPS, min(2 * text.nap, _MAX_NAP)

    def wanted(self, sequence: Sequence) -> tuple[int, float]:
        """Return how many tokens to draft behind the row of the sequence that has just been planned, -1 for none; see
        `scheduler.Wanted`."""
        text = self._texts.get(sequence.request)
        if text is None:
            return -1, 0.0
        text.coming = text.wanted if sequence.num_awaited else 0
        self.num_drafted += text.coming
        return text.wanted or -1, 0.0

    def record(self, sequence: Sequence, taken: Taken | None, accepted: int) -> None:
        """A step has run for the sequence, and its tokens are there. taken: what it took of the head's, of which the first
        `accepted` held; None if it took nothing from there."""
        text = self._texts.get(sequence.request)
        if text is None:
            return
        proposed = 0 if taken is None else len(taken.tokens)
        self.num_invalid += taken is not None and taken.is_cut
        text.asleep = max(0, text.asleep - (len(sequence.tokens) - text.known))
        text.known = len(sequence.tokens)
        for place in range(min(proposed, accepted + 1)):
            self._by_place.record(min(place, _PLACES - 1), place < accepted, text.by_place)

    def ran(self, passes: Iterable[DraftPass]) -> None:
        """The head has computed this behind a step."""
        costs = self.first_costs
        for one in passes:
            costs.observe(one.num_tokens, one.seconds)
            self.seconds += one.seconds
            costs = self.later_costs

    def _best(self, num_rows: int, ladders: Mapping[str, Sized[float]]) -> Pick:
        """Return what drafting gives at the depth that is best, and note that depth. Worked out anew now and then: it takes the
        host a good part of a small model's step."""
        key = num_rows, len(ladders)
        if self._picked is not None and self._picked[0] == key and self._steps < self._picked[1]:
            return self._picked[2]
        first_s, later_s = self.first_costs.seconds_if_known(2 * len(ladders)), self.later_costs.seconds_if_known(len(ladders))
        picks = [
            self.policy.pace_with(num_rows, [ladder[:depth] for ladder in ladders.values()], first_s + (depth - 1) * later_s)
            for depth in range(1, self.most + 1)
        ]
        best = max(picks, key=lambda pick: pick.pace)
        self._depth = 1 + picks.index(best)
        self._picked = key, self._steps + _PICKED_STEPS, best
        return best
