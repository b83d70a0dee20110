"""Who proposes what is verified, by the tokens that are expected to hold: a draft worker, a drafter in this process, or lookup
in the engine's steps. Pure.

Before each step every row's best offer is found: of the drafters here, and of its draft worker. The policy then decides how
much of which is verified. What is not chosen is compared with what came all the same.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from typing import NamedTuple

from common.engine.outcomes import Outcome
from common.engine.plan import NO_ROOM, UNKNOWN, DraftPass, Room, StepPlan
from common.engine.sequence import Sequence
from common.protocol.draft_messages import DraftSampling, Proposals
from common.protocol.explain_messages import RequestContext
from common.protocol.handles import WorkerRef
from services.decode.device_head import DeviceHeadDrafts
from services.decode.device_lookup import DeviceLookup
from services.decode.drafter import Drafter, Foreseen, Guess
from services.decode.head_drafts import HeadDrafts
from services.decode.posting import Posting
from services.decode.scheduler import Progress
from services.decode.speculation import DraftBook
from services.decode.speculation_counters import SpeculationCounters

DRAFT_WORKER = "draft worker"


class _Chosen(NamedTuple):
    """What the engine's step would choose itself, by looking it up or from its board, and the chances of that."""

    chances: list[float]
    is_posted: bool = False


@dataclass(slots=True)
class _Row:
    """verifying: who proposed what the step in flight verifies. foreseen: by outcome, what the step behind it may.

    offer: the best for the step that is being planned, if that is not the latest proposal of a draft worker, and `drafter`, the
    name of who makes it. verified: tokens verified, and accepted, by drafter.
    """

    verifying: str = ""
    foreseen: list[tuple[str, Outcome]] = field(default_factory=list)
    drafter: str = ""
    offer: Guess | Foreseen | _Chosen | None = None
    verified: dict[str, tuple[int, int]] = field(default_factory=dict)


class Proposers:
    """The scheduler's `begin_step`, `propose`, `foresee` and `room_for`.

    head: of an engine on a CPU, one of the drafters; device_head: of one on a GPU. on_device: what is known of lookup in the
    engine's steps. posting: of what draft workers propose, on the engine's board. `by_source`: what was verified, by the name
    of its drafter. `num_sequence_steps`: steps that gave tokens to a sequence, counted once for each.
    """

    def __init__(
        self,
        drafts: DraftBook,
        drafters: Sized[Drafter] = (),
        head: HeadDrafts | None = None,
        on_device: DeviceLookup | None = None,
        posting: Posting | None = None,
        device_head: DeviceHeadDrafts | None = None,
    ) -> None:
        self.drafts = drafts
        self.device_head = device_head
        self.posting = posting
        self.drafters: Sized[Drafter] = drafters if head is None else [*drafters, head]
        self.head = head
        self.on_device = on_device
        self.policy = drafts.policy
        self.by_source = {DRAFT_WORKER: drafts.counters} | {drafter.name: SpeculationCounters() for drafter in self.drafters}
        self.num_sequence_steps = 0
        for drafter in (on_device, device_head):
            if drafter is not None:
                self.by_source.setdefault(drafter.name, SpeculationCounters())
        self._rows: dict[str, _Row] = {}
        self._offered: list[_Row] = []

    @property
    def num_draft_tokens(self) -> int:
        return sum(counters.num_draft_tokens for counters in self.by_source.values())

    @property
    def num_accepted_tokens(self) -> int:
        return sum(counters.num_accepted_tokens for counters in self.by_source.values())

    @property
    def num_sequences(self) -> int:
        """Sequences that are speculated for."""
        head = self.any_head
        return max(len(self._rows), 0 if head is None else head.num_sequences)

    @property
    def any_head(self) -> HeadDrafts | DeviceHeadDrafts | None:
        """The engine's head, wherever it computes."""
        return self.head or self.device_head

    def facts_of(self, request: str) -> tuple[tuple[tuple[str, int], ...], Sized[WorkerRef]]:
        """Return what speculation came to for a sequence so far, as numbers by name, and the draft workers that were asked."""
        row, exchange = self._rows.get(request), self.drafts.exchange_of(request)
        facts = exchange.facts() if exchange is not None else []
        for drafter, (proposed, accepted) in row.verified.items() if row is not None else ():
            name = drafter.replace(" ", "_")
            facts += [(f"{name}_verified_tokens", proposed), (f"{name}_accepted_tokens", accepted)]
        return tuple(facts), exchange.workers if exchange is not None else ()

    def open(self, sequence: Sequence, context: RequestContext | None = None) -> None:
        """Begin to speculate for a sequence. context: see `DraftBook.open`."""
        self._rows[sequence.request] = _Row()
        self.drafts.open(sequence.request, sequence.tokens, draft_sampling(sequence), context)
        for drafter in self.drafters:
            drafter.open(sequence)
        for drafter in (self.on_device, self.device_head):
            if drafter is not None:
                drafter.open(sequence)

    def close(self, sequence: Sequence) -> None:
        """Harmless twice."""
        self._rows.pop(sequence.request, None)
        if self.posting is not None:
            self.posting.close(sequence)
        self.drafts.close(sequence.request)
        for drafter in self.drafters:
            drafter.close(sequence)
        for drafter in (self.on_device, self.device_head):
            if drafter is not None:
                drafter.close(sequence)

    def reset(self) -> None:
        """Forget everything and tell nobody."""
        self._rows.clear()
        if self.posting is not None:
            self.posting.reset()
        self.drafts.reset()
        for drafter in self.drafters:
            drafter.reset()
        for drafter in (self.on_device, self.device_head):
            if drafter is not None:
                drafter.reset()

    def begin_step(self, decoding: Sized[Sequence]) -> Collection[Sequence] | None:
        """A step that decodes these sequences is about to be planned. Return those for which anything may be proposed, or whose
        texts are searched; None: all. With hundreds of rows, asking each of them costs a part of the step."""
        chances: dict[str, list[float]] = {}
        others: dict[str, float] = {}
        limit = self.policy.max_tokens
        device = self.on_device
        if device is not None:
            device.begin_step(len(decoding))
        posting = self.posting if self.drafts.asks_for_few else None
        head = self.device_head
        if head is not None and head.is_resting:
            head.begin_step(decoding, others)
            head = None
        asks = self.drafters or device is not None or posting is not None or head is not None
        for row in self._offered:
            row.offer = None
        self._offered.clear()
        prospects: set[Sequence] = set()
        for sequence in decoding if asks and limit else ():
            row = self._rows.get(sequence.generation.request)
            if row is None:
                continue
            ladder = device.chances(sequence) if device is not None else None
            if ladder is not None:
                prospects.add(sequence)
            posted = posting.chances(sequence)[:limit] if posting is not None else []
            coming = head.chances(sequence)[:limit] if head is not None else []
            if head is not None:
                others[sequence.request] = max(sum(ladder or ()), self.drafts.expected(sequence.request, 0))
            if not ladder and not posted and not coming and not self.drafters:
                continue
            self._offered.append(row)
            if posted:
                row.drafter, row.offer = DRAFT_WORKER, _Chosen(posted, is_posted=True)
                chances[sequence.request] = posted
                prospects.add(sequence)
            behind = len(sequence.verifying) + 1 if sequence.num_awaited else 0
            most = sum(posted) if posted else self.drafts.expected(sequence.request, behind)
            for drafter in self.drafters:
                if drafter is self.head:
                    others[sequence.request] = most
                offer = drafter.foresee(sequence, limit) if sequence.num_awaited else drafter.guess(sequence, limit)
                if sum(offer.chances) > most:
                    most, row.drafter, row.offer = sum(offer.chances), drafter.name, offer
                    chances[sequence.request] = offer.chances
            if head is not None and sum(coming) > most:
                most, row.drafter, row.offer = sum(coming), head.name, _Chosen(coming, is_posted=True)
                chances[sequence.request] = coming
                prospects.add(sequence)
            if device is not None and ladder and sum(ladder) > most and sequence.may_be_open:
                row.drafter, row.offer = device.name, _Chosen(ladder)
                chances[sequence.request] = ladder
        proposing = self.drafts.begin_step(len(decoding), chances)
        if limit and (drafting := self.head or head) is not None:
            drafting.begin_step(decoding, others)
        if self.drafters:
            return None
        return prospects.union(s for s in decoding if s.request in proposing) if proposing else prospects

    def wanted(self, sequence: Sequence) -> tuple[int, float]:
        """See `scheduler.Wanted`."""
        head = self.any_head
        return (-1, 0.0) if head is None else head.wanted(sequence)

    def recompute(self, sequence: Sequence) -> int:
        """See `hooks.Recompute`."""
        return 0 if self.device_head is None else self.device_head.recompute(sequence)

    def room_for(self, sequence: Sequence, limit: int) -> Room:
        """At most `limit` tokens that the engine's step may choose and verify; see `hooks.RoomFor`."""
        row, device = self._rows.get(sequence.request), self.on_device
        if row is None or not self.policy.max_tokens:
            return NO_ROOM
        is_searched, is_posted = device is not None and device.is_awake(sequence), False
        room = 0
        if isinstance(row.offer, _Chosen) and (is_searched or row.offer.is_posted):
            is_posted = row.offer.is_posted
            room = self._fit(row.offer.chances, limit)
            self.policy.spend(room)
            row.foreseen = [(row.drafter, Outcome(0, UNKNOWN, [UNKNOWN] * room))] if room else []
            if not sequence.num_awaited:
                row.verifying, row.foreseen = row.drafter if room else "", []
        if device is not None and is_searched:
            device.planned(sequence)
        return Room(room, is_searched, is_posted)

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        """At most `limit` tokens to verify after the sequence's own."""
        row = self._rows.get(sequence.request)
        if row is None:
            return []
        source, offer = row.drafter, row.offer
        if isinstance(offer, Guess):
            proposal = offer.tokens[: self._fit(offer.chances, limit)]
            self.policy.spend(len(proposal))
        else:
            source, proposal = DRAFT_WORKER, self.drafts.propose(sequence.request, limit)
        row.verifying, row.foreseen = source if proposal else "", []
        return proposal

    def foresee(self, sequence: Sequence, limit: int) -> list[Outcome]:
        """At most `limit` tokens to verify behind each likely outcome of the step in flight."""
        row = self._rows.get(sequence.request)
        if row is None:
            return []
        source, offer = row.drafter, row.offer
        if isinstance(offer, Foreseen):
            length = self._fit(offer.chances, limit)
            outcomes = [Outcome(*outcome[:2], outcome.proposal[:length]) for outcome in offer.outcomes] if length else []
            self.policy.spend(length)
        else:
            source, outcomes = DRAFT_WORKER, self.drafts.foresee(sequence.request, sequence.verifying, limit)
        row.foreseen = [(source, outcome) for outcome in outcomes]
        return outcomes

    def measure(self, plan: StepPlan, seconds: float, passes: Sized[DraftPass]) -> None:
        """A step took so long, with a head's `passes`. Where these are a GPU's, a step with drafts and nothing to verify says
        nothing of one without: it was planned by the host, which may take longer than the step."""
        in_vain = self.device_head is not None and plan.num_tokens == len(plan.rows) and any(row.drafts for row in plan.rows)
        if not in_vain:
            self.policy.costs.observe(plan.num_tokens, seconds - sum(one.seconds for one in passes))
        if (head := self.any_head) is not None:
            head.ran(passes)

    def record(self, done: Progress) -> None:
        """A step ran for a sequence; its tokens are there."""
        request = done.sequence.generation.request
        self.num_sequence_steps += not done.sequence.given
        row, source = self._rows.get(request), ""
        if row is not None and (row.verifying or row.foreseen):
            source = row.verifying
            coming = done.sequence.verifying if done.sequence.num_awaited else []
            row.verifying = next((name for name, outcome in row.foreseen if coming and outcome.proposal == coming), "")
            row.foreseen = []
        if self.head is not None:
            self.head.record(done.sequence, done.drafted)
        if self.device_head is not None and (done.taken is not None or not self.device_head.is_resting):
            self.device_head.record(done.sequence, done.taken, done.accepted)
        device = self.on_device
        if device is not None and (done.looked_up is not None or device.expects(request)):
            device.record(done.sequence, done.start, done.looked_up)
        if done.forced:
            return
        if done.proposed and row is not None:
            drafter = source or DRAFT_WORKER
            proposed, accepted = row.verified.get(drafter, (0, 0))
            row.verified[drafter] = (proposed + done.proposed, accepted + done.accepted)
        if source in ("", DRAFT_WORKER):
            self.drafts.record(request, done.proposed, done.accepted)
        else:
            self.by_source[source].record(done.proposed, done.accepted)
            self.drafts.record(request, 0, 0)
        if self.posting is not None:
            self.posting.record(done.sequence, done.taken)
        for drafter in self.drafters:
            if drafter is not self.head:
                drafter.record(done.sequence)

    def on_proposals(self, message: Proposals) -> list[tuple[str, int]]:
        """A draft worker has said what may follow. Return what came too late, as `DraftBook.on_proposals` does."""
        late = self.drafts.on_proposals(message)
        if self.posting is not None:
            for row in message.rows:
                self.posting.post(row.sequence)
        return late

    def tidy(self) -> None:
        """Do what can wait, while a step runs."""
        for drafter in self.drafters:
            drafter.tidy()

    def _fit(self, chances: list[float], limit: int) -> int:
        return max(0, min(limit, self.policy.worth(chances)))


def draft_sampling(sequence: Sequence) -> DraftSampling:
    """Return what a drafter needs to draw with the noise of this sequence."""
    params = sequence.sampling
    return DraftSampling(
        seed=params.seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        prompt_tokens=sequence.generation.prompt_tokens,
    )
