"""Proposals of the engine's head, which reads its target's hidden states: how many, for whom, and what they are worth. Pure.

    begin_step: how many tokens for each sequence ─► the step runs, the head behind it ─► record: its tokens ─► guess, next step

The head runs in the engine's thread, so its time counts: its passes are measured by their number of tokens, as steps are, and
it drafts where that gives more tokens per second, as far as the chance of what it has drafted is worth one more pass. How
likely its tokens hold is measured for the whole worker, by their place and by how sure the head was; each sequence corrects
that by a factor. For which sequence drafting does not pay, it pauses, twice as long each time; then a short draft shows
whether that has changed (`num_probes`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np

from common.engine.plan import Drafted, DraftPass
from common.engine.sequence import Sequence
from services.decode.drafter import NO_GUESS, NOTHING_FORESEEN, Foreseen, Guess
from services.decode.hit_rates import RateTable, Record
from services.decode.speculation_policy import Pick, SpeculationPolicy
from services.decode.step_costs import StepCosts

_MARGIN = 1.03
"""Times the tokens per second without the head: less may be noise."""
_SURE = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
"""Where the next class of the head's own chances begins."""
_FIRST_SURE = (0.1, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 0.95)
_FIRST_RATE = 0.6
"""Of a place of a proposal."""
_PLACES = 8
"""Of a proposal that are told apart."""
_FIRST_NAP = 16
_MAX_NAP = 512
"""Tokens that a sequence pauses, at first and at most."""
_PROBE_TOKENS = 2
_MAX_PROBES = 2
"""Sequences that are probed in one step."""
_NEARLY = 0.95
"""Of the tokens per second without the head: what would give as many is soon tried again."""
_TRUST_WEIGHT = 0.02
_MAX_TRUST = 1.5
"""Of a head: the share of its tokens that hold, of the share that it expects."""
_NEXT_RATE = 0.8
"""Of a token behind one that holds."""


@dataclass(slots=True)
class _Text:
    """offer: of the head for the text's first `base` tokens; buckets, sure: of its tokens, and how sure the head was of each.

    asleep: tokens until its pause ends; nap: how long the next one is. wanted: tokens to draft in the step that is planned;
    wanted_then: when the offer was made. known: tokens that the text had after the last step.
    """

    nap: int
    asleep: int = 0
    base: int = -1
    offer: Guess = NO_GUESS
    buckets: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    wanted: int = 0
    wanted_then: int = 0
    known: int = 0
    by_place: Record = field(default_factory=Record)
    by_sureness: Record = field(default_factory=Record)


class HeadDrafts:
    """A `Drafter`. policy: its costs are those of the engine's steps without the head."""

    name = "head"

    def __init__(self, policy: SpeculationPolicy) -> None:
        self.policy = policy
        self.num_probes = 0
        self.num_drafted = 0
        self.num_invalid = 0
        self.seconds = 0.0
        self._first_costs, self._later_costs = StepCosts(), StepCosts()
        self._by_sureness = RateTable([*_FIRST_SURE] * 2 * _PLACES)
        self._by_place = RateTable([_FIRST_RATE] * _PLACES)
        self._texts: dict[str, _Text] = {}
        self._pays = True
        self._depth = 1
        self._least_chance = 0.0
        self._sure = self._right = _FIRST_RATE

    @property
    def num_sequences(self) -> int:
        return len(self._texts)

    def open(self, sequence: Sequence) -> None:
        text = self._texts[sequence.request] = _Text(_FIRST_NAP, known=len(sequence.tokens))
        if self._pays:
            text.wanted = self._depth
        else:
            text.asleep = text.nap = 4 * _FIRST_NAP

    def guess(self, sequence: Sequence, limit: int) -> Guess:
        text = self._texts.get(sequence.request)
        if text is None or text.base != len(sequence.tokens):
            return NO_GUESS
        return Guess(text.offer.tokens[:limit], text.offer.chances[:limit])

    def foresee(self, sequence: Sequence, limit: int) -> Foreseen:
        return NOTHING_FORESEEN

    def begin_step(self, decoding: Sized[Sequence], others: Mapping[str, float]) -> None:
        """Decide how many tokens are drafted for each sequence of a step that decodes these.

        others: how many tokens other drafters' offers for this step are expected to give. Who copies now will copy on.
        """
        texts = {sequence.request: self._texts[sequence.request] for sequence in decoding if sequence.request in self._texts}
        for text in texts.values():
            text.wanted = 0
        most = self.policy.max_tokens
        if self.policy.always:
            for text in texts.values():
                text.wanted = most
            return
        ladders = {
            request: ladder
            for request, text in texts.items()
            if not text.asleep and others.get(request, 0.0) <= sum(ladder := self._by_place.ladder(most, text.by_place))
        }
        num_rows = len(decoding)
        if not ladders or num_rows >= self.policy.max_step_tokens or not self.policy.costs.is_known(num_rows):
            return
        best = self._best(num_rows, ladders)
        gain = best.pace / best.plain_pace
        self._pays = gain > _MARGIN
        probes = _MAX_PROBES
        for request, ladder in ladders.items():
            text = texts[request]
            if self._pays and ladder[0] >= best.price:
                text.wanted, text.nap = self._depth, _FIRST_NAP
                continue
            if probes:
                probes -= 1
                self.num_probes += 1
                text.wanted = min(most, _PROBE_TOKENS)
            text.asleep, text.nap = text.nap, _FIRST_NAP if gain > _NEARLY else min(2 * text.nap, _MAX_NAP)

    def wanted(self, sequence: Sequence) -> tuple[int, float]:
        """Return how many tokens to draft behind the sequence's row of the step that is being planned, -1 for one that is not
        speculated for; and below which chance of all so far to stop."""
        text = self._texts.get(sequence.request)
        return (-1, 0.0) if text is None else (text.wanted, 0.0 if self.policy.always else self._least_chance)

    def record(self, sequence: Sequence, drafted: Drafted | None = None) -> None:
        text = self._texts.get(sequence.request)
        if text is None:
            return
        tokens = sequence.tokens
        text.asleep = max(0, text.asleep - (len(tokens) - text.known))
        text.known = len(tokens)
        if text.base >= 0:
            self._compare(text, tokens[text.base :])
        text.base, text.offer = -1, NO_GUESS
        if drafted is not None and not drafted.tokens:  # its logits were not finite
            self.num_invalid += 1
            self._by_place.record(0, False, text.by_place)
        elif drafted is not None:
            self.num_drafted += len(drafted.tokens)
            is_sampled = sequence.sampling.temperature > 0
            text.buckets = [_bucket(place, chance, sampled=is_sampled) for place, chance in enumerate(drafted.chances)]
            each = [self._by_sureness.chance(bucket, text.by_sureness) for bucket in text.buckets]
            text.wanted_then, text.sure = text.wanted, drafted.chances
            text.base, text.offer = len(tokens), Guess(drafted.tokens, list(accumulate(each, mul)))

    def _compare(self, text: _Text, came: Sized[int]) -> None:
        """Note which of the offered tokens hold, up to the first that does not. One that was not drafted, because the head was
        not sure enough, counts as one that does not."""
        for place, (token, bucket, right) in enumerate(zip(text.offer.tokens, text.buckets, came, strict=False)):
            self._by_place.record(min(place, _PLACES - 1), token == right, text.by_place)
            self._by_sureness.record(bucket, token == right, text.by_sureness)
            self._sure += _TRUST_WEIGHT * (text.sure[place] - self._sure)
            self._right += _TRUST_WEIGHT * ((token == right) - self._right)
            if token != right:
                return
        place = len(text.offer.tokens)
        if place < min(text.wanted_then, len(came)):
            self._by_place.record(min(place, _PLACES - 1), False, text.by_place)

    def ran(self, passes: Sized[DraftPass]) -> None:
        """Record the passes that the head ran behind a step; there may be none."""
        if not passes:
            self._first_costs.skip()
        costs = self._first_costs
        for one in passes:
            costs.observe(one.num_tokens, one.seconds)
            self.seconds += one.seconds
            costs = self._later_costs

    def close(self, sequence: Sequence) -> None:
        self._texts.pop(sequence.request, None)

    def tidy(self) -> None:
        """There is nothing that can wait."""

    def reset(self) -> None:
        self._texts.clear()

    def _best(self, num_rows: int, ladders: Mapping[str, Sized[float]]) -> Pick:
        """Return what drafting gives at the depth that is best, and note when to stop before that."""
        first_s = self._first_costs.seconds_if_known(2 * len(ladders))
        later_s = min(first_s, self._later_costs.seconds_if_known(len(ladders)))  # fewer pairs than the first
        depths = range(1, self.policy.max_tokens + 1)
        picks = [
            self.policy.pace_with(num_rows, [ladder[:depth] for ladder in ladders.values()], first_s + (depth - 1) * later_s)
            for depth in depths
        ]
        best = max(picks, key=lambda pick: pick.pace)
        self._depth = min(len(picks), 2 + picks.index(best))
        alone_s, verified_s = self.policy.costs.seconds(np.array([num_rows, num_rows + len(depths)]))
        trust = min(_MAX_TRUST, max(1 / _MAX_TRUST**2, self._right / max(self._sure, 1e-6)))
        one_more_s = (verified_s - alone_s) / len(depths) + later_s / len(ladders)
        self._least_chance = min(1.0, float(one_more_s) * max(best.pace, best.plain_pace) / _NEXT_RATE / trust)
        return best


def _bucket(place: int, chance: float, *, sampled: bool) -> int:
    """Return the table's row for a token at a place of a proposal, of which its head was so sure."""
    return (min(place, _PLACES - 1) + _PLACES * sampled) * len(_FIRST_SURE) + bisect_right(_SURE, chance)
