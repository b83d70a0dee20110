"""Speculation on the decode side: align, accept, how much to propose, and which draft worker mirrors which sequence. Pure.

Decoding never waits for a proposal. Each step sends every draft worker one `DraftUpdate` with the tokens that the step
fixed; what comes back names the length (`base`) it was made for. By then the sequence may be j tokens longer: the proposal
is still good if its first j tokens are what was generated, and what follows them is verified in the next forward pass.

A proposal is token ids only and is accepted where it equals what the target samples, so anything here may be late, lost,
wrong or hostile: it costs speed, never a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.engine.outcomes import Outcome, accept
from common.protocol.draft_messages import DraftClose, DraftResync, DraftRow, DraftUpdate, Proposals
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence

MAX_PROPOSAL = 64
"""Tokens of one proposal that are kept; more would be stale before it is used."""
RESYNC_TOKENS = 16
"""A sequence is sent whole again only after this many new tokens, and twice as many each time."""


def align(base: int, proposal: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """What a proposal made for the first `base` of `tokens` still proposes now: [] if it disagrees or is used up."""
    late = len(tokens) - base
    if late < 0 or late >= len(proposal) or any(tokens[base + i] != proposal[i] for i in range(late)):
        return []
    return list(proposal[late:])


@dataclass(slots=True)
class Pace:
    """How well proposals for one sequence do: the chance that a proposed token is accepted, and a pause after misses.

    `asleep` counts down the tokens until the next probe; `nap` is how long the next pause will be.
    """

    rate: float
    nap: int
    asleep: int = 0


class SpeculationPolicy:
    """How many tokens to verify, per sequence and per step.

    The k-th proposed token helps with chance rate^k; it is verified while that is above `min_gain`, up to `max_tokens`.
    Below `min_rate` the sequence pauses for `nap_tokens`, then twice as long after each failed probe. A step as a whole
    verifies only what fits, with one token per running row, into `max_step_tokens`: about where a step starts to be bound
    by compute and verification is no longer free. Draft models slow serving down 1.4-1.8x at high load without that.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_step_tokens: int,
        min_gain: float = 0.2,
        min_rate: float = 0.15,
        nap_tokens: int = 16,
        max_nap_tokens: int = 512,
    ) -> None:
        self.max_tokens = max_tokens
        self.max_step_tokens = max_step_tokens
        self.min_gain = min_gain
        self.min_rate = min_rate
        self.nap_tokens = nap_tokens
        self.max_nap_tokens = max_nap_tokens
        self._left = max_step_tokens
        self._share = max_tokens

    def pace(self) -> Pace:
        return Pace(rate=0.7, nap=self.nap_tokens)

    def begin_step(self, num_rows: int) -> None:
        """A step with `num_rows` decoding rows is about to be planned."""
        self._left = max(0, self.max_step_tokens - num_rows)
        self._share = max(1, self._left // max(1, num_rows))

    def length(self, pace: Pace) -> int:
        """Tokens to verify for a sequence in this step."""
        if pace.asleep > 0:
            return 0
        rate = min(max(pace.rate, self.min_gain), 0.99)  # at the least a probe of one token
        worth = int(math.log(self.min_gain) / math.log(rate))
        return max(0, min(worth, self.max_tokens, self._share, self._left))

    def spend(self, num_tokens: int) -> None:
        self._left -= num_tokens

    def record(self, pace: Pace, proposed: int, accepted: int) -> None:
        """A step verified `proposed` tokens of a sequence and accepted the first `accepted`."""
        if pace.asleep > 0:
            pace.asleep = max(0, pace.asleep - 1 - accepted)
        if not proposed:
            return
        trials = accepted + (accepted < proposed)
        pace.rate += (1.0 - 0.85**trials) * (accepted / trials - pace.rate)
        if pace.rate >= self.min_rate:
            pace.nap = self.nap_tokens
        elif not accepted:
            pace.asleep = pace.nap
            pace.nap = min(2 * pace.nap, self.max_nap_tokens)


@dataclass(slots=True)
class SpeculationCounters:
    """vLLM's `spec_decode_num_drafts`, `_draft_tokens`, `_accepted_tokens` and `_accepted_tokens_per_pos`."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def record(self, proposed: int, accepted: int) -> None:
        if not proposed:
            return
        self.num_drafts += 1
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        missing = proposed - len(self.accepted_per_position)
        if missing > 0:
            self.accepted_per_position += [0] * missing
        for position in range(accepted):
            self.accepted_per_position[position] += 1


@dataclass(slots=True)
class _Mirror:
    """`worker` mirrors this sequence and was sent its first `sent` tokens. `tokens` is the sequence's own, growing list."""

    tokens: Sequence[int]
    pace: Pace
    worker: WorkerRef | None = None
    sent: int = 0
    base: int = 0
    proposal: Sequence[int] = ()
    whole_at: int = 0
    resync_tokens: int = RESYNC_TOKENS


class DraftBook:
    """Which draft worker mirrors which of this worker's sequences, and what it proposed last.

    Life of a sequence: `open` → each step `propose`, `record`, `messages` → `close`. `set_workers` says, at every
    heartbeat, which draft workers there are; a sequence whose worker has gone is given to another one and sent whole.
    `max_update_tokens` bounds one message; what doesn't fit goes with the next step.
    """

    def __init__(self, policy: SpeculationPolicy, *, vocab_size: int, max_update_tokens: int = 131_072) -> None:
        self.policy = policy
        self.vocab_size = vocab_size
        self.max_update_tokens = max_update_tokens
        self.counters = SpeculationCounters()
        self._mirrors: dict[str, _Mirror] = {}
        self._rooms: dict[WorkerRef, int] = {}  # how many more mirrors each draft worker takes
        self._closing: dict[WorkerRef, list[str]] = {}

    def __len__(self) -> int:
        return len(self._mirrors)

    def worker_of(self, sequence: str) -> WorkerRef | None:
        mirror = self._mirrors.get(sequence)
        return mirror.worker if mirror else None

    def open(self, sequence: str, tokens: Sequence[int]) -> None:
        """Begin to speculate for `sequence`; `tokens` is kept and read, and grows outside."""
        self.close(sequence)
        self._mirrors[sequence] = mirror = _Mirror(tokens=tokens, pace=self.policy.pace())
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

    def set_workers(self, workers: Iterable[Presence]) -> None:
        """`workers`: the draft workers alive now. Those that drain get nothing new and lose what they have."""
        ready = {presence.worker: presence.credits for presence in workers if presence.state == "ready"}
        self._closing = {worker: closing for worker, closing in self._closing.items() if worker in ready}
        self._rooms = ready
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

    def begin_step(self, num_rows: int) -> None:
        """A step with `num_rows` decoding rows is about to be planned."""
        self.policy.begin_step(num_rows)

    def propose(self, sequence: str, limit: int) -> list[int]:
        """At most `limit` tokens to verify after the sequence's own; [] when nothing useful has arrived."""
        mirror = self._mirrors.get(sequence)
        if mirror is None or not mirror.proposal:
            return []
        usable = align(mirror.base, mirror.proposal, mirror.tokens)
        if not usable:
            mirror.proposal = ()
            return []
        usable = usable[: max(0, min(limit, self.policy.length(mirror.pace)))]
        self.policy.spend(len(usable))
        return usable

    def foresee(self, sequence: str, verifying: Sequence[int], limit: int) -> list[Outcome]:
        """At most `limit` tokens to verify behind the step in flight, which verifies `verifying`: if that ends as the latest
        proposal says."""
        mirror = self._mirrors.get(sequence)
        if mirror is None or not mirror.proposal:
            return []
        usable = align(mirror.base, mirror.proposal, mirror.tokens)
        accepted = accept(verifying, usable)
        behind = usable[accepted + 1 :][: max(0, min(limit, self.policy.length(mirror.pace)))]
        if not behind:
            return []
        self.policy.spend(len(behind))
        return [Outcome(accepted, usable[accepted], behind)]

    def record(self, sequence: str, proposed: int, accepted: int) -> None:
        """A step ran for the sequence, with `proposed` tokens to verify (perhaps none)."""
        self.counters.record(proposed, accepted)
        mirror = self._mirrors.get(sequence)
        if mirror is not None:
            self.policy.record(mirror.pace, proposed, accepted)

    def on_proposals(self, message: Proposals) -> None:
        """The latest proposal wins; what is older, unknown, from another worker or beyond the vocabulary is dropped."""
        for row in message.rows:
            mirror = self._mirrors.get(row.sequence)
            if mirror is None or mirror.worker != message.draft or not mirror.base <= row.base <= mirror.sent:
                continue
            proposal = row.tokens[:MAX_PROPOSAL]
            for index, token in enumerate(proposal):
                if not 0 <= token < self.vocab_size:
                    proposal = proposal[:index]
                    break
            mirror.base, mirror.proposal = row.base, proposal

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
        room: dict[WorkerRef, int] = {}
        for sequence, mirror in self._mirrors.items():
            worker, sent = mirror.worker, mirror.sent
            if worker is None or mirror.pace.asleep > 1 or len(mirror.tokens) <= sent:
                continue
            left = room.get(worker, self.max_update_tokens)
            if left <= 0:
                continue
            fresh = list(mirror.tokens[sent : sent + left])
            if not sent:
                mirror.whole_at = len(mirror.tokens)
            mirror.sent = sent + len(fresh)
            room[worker] = left - len(fresh)
            rows.setdefault(worker, []).append(DraftRow(sequence=sequence, base=sent, tokens=fresh))
        result += [(worker, DraftUpdate(decode=decode, rows=fresh_rows)) for worker, fresh_rows in rows.items()]
        return result

    def _assign(self, mirror: _Mirror) -> None:
        """Give the sequence to the draft worker with the most room, if any has room."""
        worker = max(self._rooms, key=self._rooms.__getitem__, default=None)
        if worker is None or self._rooms[worker] <= 0:
            return
        self._rooms[worker] -= 1
        mirror.worker = worker
        mirror.sent = mirror.whole_at = 0
        mirror.base, mirror.proposal = 0, ()

    def _leave(self, sequence: str, mirror: _Mirror) -> None:
        """Take the sequence from its worker, which is told if it still lives."""
        worker, mirror.worker = mirror.worker, None
        mirror.base, mirror.proposal = 0, ()
        if worker is not None and worker in self._rooms:
            self._rooms[worker] += 1
            self._closing.setdefault(worker, []).append(sequence)
