"""Speculation on the decode side: align, accept, how much to propose, and which draft worker mirrors which sequence. Pure.

Decoding never waits for a proposal. Each step sends every draft worker one `DraftUpdate` with the tokens that the step
fixed; what comes back names the length (`base`) it was made for. By then the sequence may be j tokens longer: the proposal
is still good if its first j tokens are what was generated, and what follows them is verified in the next forward pass.

A proposal is token ids only and is accepted where it equals what the target samples, so anything here may be late, lost,
wrong or hostile: it costs speed, never a token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from common.engine.board import BOARD_SLOTS
from common.engine.outcomes import Outcome, accept, width_of
from common.protocol.draft_messages import DraftBranch, DraftClose, DraftResync, DraftRow, DraftSampling, DraftUpdate, Proposals
from common.protocol.explain_messages import RequestContext
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from services.decode.draft_trial import DraftTrial
from services.decode.exchange import Exchange
from services.decode.mirrored_sequence import MAX_PROPOSAL, MirroredSequence, align, holds
from services.decode.speculation_counters import SpeculationCounters
from services.decode.speculation_policy import Pace, SpeculationPolicy

MAX_BRANCHES = 16
"""Entries of an outcome table that are kept."""
FEW_SEQUENCES = BOARD_SLOTS
"""Speculated for at once, at most, where steps take what is posted when they begin, and draft workers are told first."""
QUIET_SHARE, QUIET_TOKENS = 8, 16
"""Where there are more than FEW_SEQUENCES, a sequence that was sent N tokens since anything was proposed for it is sent further
ones N / QUIET_SHARE together, QUIET_TOKENS at most: sending each of hundreds of rows every token takes a part of the step."""


class DraftBook:
    """Which draft worker mirrors which of this worker's sequences, and what it proposed last.

    Life of a sequence: `open` → each step `propose`, `record`, `messages` → `close`. `set_workers` says, at every
    heartbeat, which draft workers there are; a sequence whose worker has gone is given to another one and sent whole.
    `max_update_tokens` bounds one message; what doesn't fit goes with the next step. While `trial` says so, nothing is sent.
    """

    def __init__(
        self,
        policy: SpeculationPolicy,
        *,
        vocab_size: int,
        max_update_tokens: int = 131_072,
        trial: DraftTrial | None = None,
    ) -> None:
        self.policy = policy
        self.trial = trial or DraftTrial(enabled=False)
        self.vocab_size = vocab_size
        self.max_update_tokens = max_update_tokens
        self.counters = SpeculationCounters()
        self.costs = policy.costs
        self._mirrors: dict[str, MirroredSequence] = {}
        self._rooms: dict[WorkerRef, int] = {}  # how many more mirrors each draft worker takes
        self._longest: dict[WorkerRef, int] = {}  # texts as long get nothing of those draft workers
        self._with_model: frozenset[WorkerRef] = frozenset()  # draft workers that compute texts before they propose
        self._closing: dict[WorkerRef, list[str]] = {}

    def __len__(self) -> int:
        return len(self._mirrors)

    @property
    def is_mirrored(self) -> bool:
        """Does any draft worker have a sequence of this worker's?"""
        return any(mirror.worker is not None for mirror in self._mirrors.values())

    def are_caught_up(self) -> bool:
        """Whether draft workers with a model have proposed something for most of the sequences that they mirror."""
        asked = [one.answered for one in self._mirrors.values() if one.worker in self._with_model and not one.pace.asleep]
        return 4 * sum(asked) >= 3 * len(asked)

    @property
    def asks_for_few(self) -> bool:
        """Are draft workers told what is decoded, of a few sequences?"""
        return self.trial.asking and 0 < len(self._mirrors) <= FEW_SEQUENCES and self.policy.max_tokens > 0

    @property
    def expects_proposals(self) -> bool:
        """Are draft workers at work on a few sequences? They wait for what each step gives."""
        return self.asks_for_few and any(self.rate_of(sequence) for sequence in self._mirrors)

    def worker_of(self, sequence: str) -> WorkerRef | None:
        mirror = self._mirrors.get(sequence)
        return mirror.worker if mirror else None

    def exchange_of(self, sequence: str) -> Exchange | None:
        """Return what passed between the sequence and draft workers so far; None: there is no speculation for it."""
        mirror = self._mirrors.get(sequence)
        return None if mirror is None else mirror.exchange

    def pace_of(self, sequence: str) -> Pace:
        """:raises KeyError: if there is no speculation for it."""
        return self._mirrors[sequence].pace

    def open(
        self,
        sequence: str,
        tokens: Sequence[int],
        sampling: DraftSampling | None = None,
        context: RequestContext | None = None,
    ) -> None:
        """Begin to speculate for `sequence`; `tokens` is kept and read, and grows outside. sampling: how its tokens are drawn;
        None: greedily. context: what draft workers are told of its request."""
        self.close(sequence)
        mirror = MirroredSequence(
            tokens=tokens, pace=self.policy.pace(), sampling=sampling or DraftSampling(), known=len(tokens)
        )
        mirror.exchange.context = context or RequestContext()
        self._mirrors[sequence] = mirror
        self._assign(mirror)

    def close(self, sequence: str) -> None:
        """Harmless twice. Its worker hears of it with the next `messages`."""
        mirror = self._mirrors.pop(sequence, None)
        if mirror is not None and mirror.worker is not None:
            self._leave(sequence, mirror)

    def reset(self) -> None:
        """Forget everything and tell nobody: this worker has a new epoch."""
        self._mirrors.clear()
        self._rooms.clear()
        self._closing.clear()

    def set_workers(self, workers: Collection[Presence]) -> None:
        """`workers`: the draft workers alive now. Those that drain get nothing new and lose what they have."""
        ready = {presence.worker: presence.credits for presence in workers if presence.state == "ready"}
        self._closing = {worker: closing for worker, closing in self._closing.items() if worker in ready}
        self._rooms = ready
        self._longest = {presence.worker: presence.drafting.longest for presence in workers if presence.drafting.longest}
        self._with_model = frozenset(presence.worker for presence in workers if presence.vocabulary)
        for sequence, mirror in self._mirrors.items():
            if mirror.worker is not None and mirror.worker not in ready:
                self._leave(sequence, mirror)
            if mirror.worker is None:
                self._assign(mirror)

    def worker_lost(self, worker: WorkerRef) -> None:
        """That draft worker is gone: its sequences go to others, or are decoded without one."""
        self._rooms.pop(worker, None)
        self._closing.pop(worker, None)
        for sequence, mirror in self._mirrors.items():
            if mirror.worker == worker:
                self._leave(sequence, mirror)
                self._assign(mirror)

    def begin_step(self, num_rows: int, better: Mapping[str, Sequence[float]] = MappingProxyType({})) -> Collection[str]:
        """A step with `num_rows` decoding rows is about to be planned. Return the sequences that have a proposal.

        better: for sequences that have a better proposal than a draft worker's, the chances of its tokens.
        """
        rates = {
            sequence: mirror.pace.rate
            for sequence, mirror in self._mirrors.items()
            if mirror.proposal and not mirror.pace.asleep and sequence not in better
        }
        self.policy.begin_step(num_rows, list(rates.values()), list(better.values()))
        return rates.keys()

    def expected(self, sequence: str, ahead: int = 0) -> float:
        """How many tokens of the latest proposal would be accepted if it were verified, `ahead` tokens from now."""
        mirror = self._mirrors.get(sequence)
        if mirror is None or not mirror.proposal or mirror.pace.asleep:
            return 0.0
        length = len(align(mirror.base, mirror.proposal, mirror.tokens)) - ahead
        return sum(mirror.pace.rate**count for count in range(1, 1 + min(length, self.policy.max_tokens)))

    def propose(self, sequence: str, limit: int) -> list[int]:
        """At most `limit` tokens to verify after the sequence's own; [] when nothing useful has arrived."""
        mirror = self._mirrors.get(sequence)
        if mirror is None or not mirror.proposal:
            return []
        self._turn(mirror)
        usable = align(mirror.base, mirror.proposal, mirror.tokens)
        if not usable:
            mirror.proposal = ()
            return []
        usable = usable[: max(0, min(limit, self.policy.length(mirror.pace)))]
        self.policy.spend(len(usable))
        return usable

    def rate_of(self, sequence: str) -> float:
        """Return how often tokens proposed for the sequence are right; 0: nothing is proposed for it."""
        mirror = self._mirrors.get(sequence)
        return mirror.pace.rate if mirror is not None and mirror.sent and not mirror.pace.asleep else 0.0

    def lines(self, sequence: str) -> list[list[int]]:
        """Return what may follow the sequence's tokens: the latest proposal, then the entries of its table, without those that
        have failed."""
        mirror = self._mirrors.get(sequence)
        if mirror is None or not mirror.proposal:
            return []
        self._turn(mirror)
        lines = [align(mirror.base, mirror.proposal, mirror.tokens)]
        lines += [align(mirror.table_base, one, mirror.tokens) for one in mirror.table]
        return [line for line in lines if line]

    def foresee(self, sequence: str, verifying: Sequence[int], limit: int) -> list[Outcome]:
        """At most `limit` tokens to verify behind the step in flight, which verifies `verifying`: if that ends as the latest
        proposal says, and as its table says it may."""
        mirror = self._mirrors.get(sequence)
        if mirror is None or not mirror.proposal:
            return []
        lines = self.lines(sequence)
        room = max(0, min(limit, self.policy.length(mirror.pace)))
        outcomes: dict[tuple[int, int], Outcome] = {}
        for usable in lines:
            accepted = accept(verifying, usable)
            behind = usable[accepted + 1 :][:room]
            if behind:
                outcomes.setdefault((accepted, usable[accepted]), Outcome(accepted, usable[accepted], behind))
        found = list(outcomes.values())
        self.policy.spend(width_of(found))
        return found

    def record(self, sequence: str, proposed: int, accepted: int) -> None:
        """A step ran for the sequence, with `proposed` tokens to verify (perhaps none). Its tokens are there.

        What was proposed, but not verified, is compared with what came all the same.
        """
        if proposed:
            self.counters.record(proposed, accepted)
        mirror = self._mirrors.get(sequence)
        if mirror is None:
            return
        known, mirror.known = mirror.known, len(mirror.tokens)
        if mirror.pace.asleep:
            self.policy.passed(mirror.pace, mirror.known - known)
        if proposed:
            self.policy.record(mirror.pace, accepted, int(accepted < proposed))
        elif mirror.proposal and (guess := align(mirror.base, mirror.proposal, mirror.tokens, known)):
            came = mirror.tokens[known : known + len(guess)]
            hits = accept(guess, came)
            self.policy.record(mirror.pace, hits, int(hits < len(came)))
        if mirror.table:
            self._turn(mirror)
        if mirror.worker is not None and not self._suits(mirror.worker, mirror):
            self._leave(sequence, mirror)
            self._assign(mirror)

    def on_proposals(self, message: Proposals) -> list[tuple[str, int]]:
        """The latest proposal wins, unless it has failed and one that was there holds; what is older, unknown, from another
        worker or beyond the vocabulary is dropped. Return the late ones: the sequence, and its length behind the last token."""
        late: list[tuple[str, int]] = []
        for row in message.rows:
            mirror = self._mirrors.get(row.sequence)
            if mirror is None or mirror.worker != message.draft or not mirror.base <= row.base <= mirror.sent:
                continue
            proposal = self._known(row.tokens)
            if proposal:
                mirror.quiet, mirror.answered = 0, True
                self.counters.num_received += 1
                mirror.exchange.num_received += 1
                if len(mirror.tokens) - row.base >= len(proposal):
                    self.counters.num_late += 1
                    mirror.exchange.num_late += 1
                    late.append((row.sequence, row.base + len(proposal)))
            held = mirror.base, mirror.proposal
            mirror.base, mirror.proposal = row.base, proposal
            if row.sequence in message.tables:
                lines = self._table(proposal, message.tables[row.sequence])
                mirror.table_base, mirror.table = row.base, [one for one in lines if holds(row.base, one, mirror.tokens)]
            if not holds(row.base, proposal, mirror.tokens) and align(*held, mirror.tokens):
                mirror.base, mirror.proposal = held
            self._turn(mirror)
        return late

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        """What is before the first id that is none, and not too long."""
        tokens = tokens[:MAX_PROPOSAL]
        for index, token in enumerate(tokens):
            if not 0 <= token < self.vocab_size:
                return tokens[:index]
        return tokens

    def _table(self, proposal: Sequence[int], branches: Sequence[DraftBranch]) -> list[Sequence[int]]:
        """Return a whole proposal for each entry that fits behind `proposal`."""
        lines = []
        for branch in branches[:MAX_BRANCHES]:
            if 0 <= branch.accepted <= len(proposal) and (tokens := self._known(branch.tokens)):
                lines.append([*proposal[: branch.accepted], *tokens])
        return lines

    def _turn(self, mirror: MirroredSequence) -> None:
        """Where the proposal has failed, go on with the entry of the table that holds."""
        if not mirror.table or holds(mirror.base, mirror.proposal, mirror.tokens):
            return
        table, mirror.table = mirror.table, ()
        line = next((one for one in table if align(mirror.table_base, one, mirror.tokens)), None)
        if line is None:
            self.counters.num_table_misses += 1
        else:
            self.counters.num_table_hits += 1
            mirror.base, mirror.proposal = mirror.table_base, line

    def on_resync(self, message: DraftResync) -> None:
        """Send these whole again, unless that was done a moment ago."""
        for sequence in message.sequences:
            mirror = self._mirrors.get(sequence)
            if mirror is None or mirror.worker != message.draft or not mirror.sent:
                continue
            if len(mirror.tokens) - mirror.whole_at < mirror.resync_tokens and mirror.whole_at:
                continue
            mirror.sent = 0
            mirror.resync_tokens *= 2

    def messages(self, decode: WorkerRef) -> list[tuple[WorkerRef, DraftUpdate | DraftClose]]:
        """What to tell the draft workers now: at most one DraftClose and one DraftUpdate each. Call once per step."""
        result: list[tuple[WorkerRef, DraftUpdate | DraftClose]] = [
            (worker, DraftClose(decode=decode, sequences=sequences)) for worker, sequences in self._closing.items()
        ]
        self._closing = {}
        rows: dict[WorkerRef, list[DraftRow]] = {}
        sampling: dict[WorkerRef, dict[str, DraftSampling]] = {}
        contexts: dict[WorkerRef, dict[str, RequestContext]] = {}
        room: dict[WorkerRef, int] = {}
        are_many = len(self._mirrors) > FEW_SEQUENCES
        for sequence, mirror in self._mirrors.items() if self.trial.asking else ():
            worker, sent = mirror.worker, mirror.sent
            fewest = min(QUIET_TOKENS, mirror.quiet // QUIET_SHARE) if are_many and sent else 1
            if worker is None or mirror.pace.asleep > 1 or len(mirror.tokens) - sent < max(fewest, 1):
                continue
            left = room.get(worker, self.max_update_tokens)
            if left <= 0:
                continue
            fresh = list(mirror.tokens[sent : sent + left])
            if not sent:
                mirror.whole_at = len(mirror.tokens)
                sampling.setdefault(worker, {})[sequence] = mirror.sampling
                contexts.setdefault(worker, {})[sequence] = mirror.exchange.context
                mirror.exchange.opened(worker)
            else:
                mirror.quiet += len(fresh)
            mirror.answered = mirror.answered and len(fresh) <= MAX_PROPOSAL
            mirror.exchange.num_updates += 1
            mirror.sent = sent + len(fresh)
            room[worker] = left - len(fresh)
            rows.setdefault(worker, []).append(DraftRow(sequence=sequence, base=sent, tokens=fresh))
        result += [
            (
                worker,
                DraftUpdate(
                    decode=decode, rows=fresh_rows, sampling=sampling.get(worker, {}), contexts=contexts.get(worker, {})
                ),
            )
            for worker, fresh_rows in rows.items()
        ]
        return result

    def _assign(self, mirror: MirroredSequence) -> None:
        """Give the sequence to the draft worker with the most room, if any has room and a long enough context."""
        suitable = [worker for worker in self._rooms if self._suits(worker, mirror)]
        worker = max(suitable, key=self._rooms.__getitem__, default=None)
        if worker is None or self._rooms[worker] <= 0:
            return
        self._rooms[worker] -= 1
        mirror.worker = worker
        mirror.sent = mirror.whole_at = mirror.quiet = 0
        mirror.answered = False
        mirror.base, mirror.proposal, mirror.table = 0, (), ()

    def _suits(self, worker: WorkerRef, mirror: MirroredSequence) -> bool:
        """Whether the draft worker drafts behind so long a text."""
        longest = self._longest.get(worker)
        return longest is None or len(mirror.tokens) < longest

    def _leave(self, sequence: str, mirror: MirroredSequence) -> None:
        """Take the sequence from its worker, which is told if it still lives."""
        worker, mirror.worker = mirror.worker, None
        mirror.base, mirror.proposal, mirror.table = 0, (), ()
        if worker is not None and worker in self._rooms:
            self._rooms[worker] += 1
            self._closing.setdefault(worker, []).append(sequence)
