"""The draft worker: mirrors sequences of decode workers and keeps guessing what comes next.

The life of a sequence here:

    DraftUpdate (base 0) ─► mirrored ─► DraftUpdate each step ─► Proposals to its decode worker ─► DraftClose: forgotten
                               ▲           └ gap ─► DraftResync ─┐      or its worker is lost, or it is the one updated
                               └─────────── whole again ◄────────┘      least recently and there is no room

Nothing is owed to anyone here: a draft worker may be slow, wrong or dead, and costs its decode workers speed alone. When
updates come faster than they are served, all that have arrived are applied, and only then are guesses made, once each.
A `DraftClose` may be lost like any message: a mirror that nothing was heard of for a lease is forgotten, and so are all when
the bus was away. Who goes on with one has a gap then, and sends it whole.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable

import anyio
import anyio.lowlevel

from common.protocol.draft_messages import DraftClose, Drafting, DraftResync, DraftRow, DraftSampling, DraftUpdate, Proposals
from common.protocol.errors import ProtocolError
from common.protocol.explain_messages import Explain
from common.protocol.handles import WorkerRef
from common.protocol.messages import Message, Presence
from common.runtime import logs
from common.runtime.actor import Actor, WorkerState
from common.runtime.bus import Bus
from common.runtime.request_records import RequestRecords
from services.draft.config import DraftConfig
from services.draft.drafting_notes import DraftingNotes
from services.draft.ngram import NgramProposer
from services.draft.proposer import MirrorKey, Proposer

log = logs.get("draft")

MAX_QUEUED = 256
"""Messages waiting to be served. What is dropped then shows as a gap, and is asked for again."""


class BusyShare:
    """The part of the time that was spent on work, a moving average over about `period_s` seconds."""

    def __init__(self, period_s: float = 3.0) -> None:
        self._period_s = period_s
        self._pending_s = self._share = 0.0
        self._read_at: float | None = None

    def add(self, seconds: float) -> None:
        self._pending_s += seconds

    def share(self, now: float) -> float:
        """Return it, 0 to 1, with what was added since it was last read."""
        if self._read_at is not None and now > self._read_at:
            elapsed_s = now - self._read_at
            weight = 1.0 - math.exp(-elapsed_s / self._period_s)
            self._share += weight * (min(1.0, self._pending_s / elapsed_s) - self._share)
        self._read_at, self._pending_s = now, 0.0
        return self._share


class DraftActor(Actor):
    role = "draft"
    hears = ("decode",)
    config: DraftConfig

    def __init__(
        self,
        *,
        bus: Bus,
        config: DraftConfig,
        proposer: Proposer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(bus=bus, config=config, clock=clock)
        if proposer is None:
            proposer = NgramProposer(
                max_sequences=config.max_sequences,
                max_tokens=config.max_sequence_tokens,
                min_match=config.min_match,
                max_match=config.max_match,
            )
        self.proposer = proposer
        self.max_proposal = config.max_proposal(on_gpu=False)
        self._queue: deque[DraftUpdate | DraftClose] = deque(maxlen=MAX_QUEUED)
        self._wake = anyio.Event()
        self._heard_at: dict[WorkerRef, float] = {}
        self._updated_at: dict[MirrorKey, float] = {}  # least recently updated first
        self.notes = DraftingNotes(RequestRecords(lambda: self.tracing, lambda: self.ref, clock))
        self._num_proposals = self.metrics.counter("draft_proposals_total", "Proposals sent to decode workers")
        self._num_tokens = self.metrics.counter("draft_proposed_tokens_total", "Tokens of proposals sent to decode workers")
        self._num_resyncs = self.metrics.counter("draft_resyncs_total", "Mirrors that had a gap and were asked for again")
        self._num_dropped = self.metrics.counter("draft_updates_dropped_total", "Updates dropped because too many waited")
        self._busy_s = self.metrics.counter(
            "draft_busy_seconds_total", "Seconds spent on proposals; its rate is the draft worker's utilisation"
        )
        self._busy = BusyShare()
        self.metrics.gauge("draft_mirrors", "Sequences mirrored", read=lambda: len(self.proposer))

    def handle(self, message: Message, reply: str) -> None:
        match message:
            case DraftUpdate() | DraftClose():
                if len(self._queue) == MAX_QUEUED:
                    self._num_dropped.inc()
                self._queue.append(message)
                self._wake.set()
            case Explain():
                self.answer(reply, self.notes.explain(message.request, self.clock()))
            case _:
                log.warning("unexpected_message", message=type(message).__name__)

    async def work(self) -> None:
        while True:
            if not self._queue:
                self._wake = anyio.Event()
                await self._wake.wait()
            began = self.clock()
            self.serve()
            self.was_busy(self.clock() - began)
            await anyio.lowlevel.checkpoint()

    def was_busy(self, seconds: float) -> None:
        self._busy_s.inc(max(0.0, seconds))
        self._busy.add(max(0.0, seconds))

    def serve(self, drafted: Iterable[MirrorKey] = ()) -> None:
        """Apply every message that has arrived, then send each decode worker one `Proposals` (and one `DraftResync`).

        drafted: mirrors that have something to propose already.
        """
        fresh: dict[WorkerRef, dict[str, None]] = {}
        for decode, sequence in drafted:
            fresh.setdefault(decode, {})[sequence] = None
        gaps: dict[WorkerRef, dict[str, None]] = {}
        while self._queue:
            message = self._queue.popleft()
            self._heard_at[message.decode] = self.clock()
            if isinstance(message, DraftClose):
                for sequence in message.sequences:
                    self._close((message.decode, sequence))
                    fresh.get(message.decode, {}).pop(sequence, None)
                continue
            for row in message.rows:
                self.notes.updated((message.decode, row.sequence), message.contexts.get(row.sequence), self.clock())
                joined = self._update(message.decode, row, message.sampling.get(row.sequence))
                (fresh if joined else gaps).setdefault(message.decode, {})[row.sequence] = None
                (gaps if joined else fresh).get(message.decode, {}).pop(row.sequence, None)
        for decode, sequences in fresh.items():
            self._propose(decode, list(sequences))
        for decode, sequences in gaps.items():
            if sequences:
                self._num_resyncs.inc(len(sequences))
                for sequence in sequences:
                    self.notes.resynced((decode, sequence))
                self.send(decode, DraftResync(draft=self.ref, sequences=list(sequences)))

    def _update(self, decode: WorkerRef, row: DraftRow, sampling: DraftSampling | None) -> bool:
        key = (decode, row.sequence)
        self._updated_at.pop(key, None)
        self._updated_at[key] = self.clock()
        try:
            return self.proposer.update(key, row.base, row.tokens, sampling)
        except ProtocolError as error:
            log.warning("update_refused", decode=decode.id, sequence=row.sequence, reason=str(error))
            return True  # sent again it would be refused again

    def _propose(self, decode: WorkerRef, sequences: list[str]) -> None:
        keys = [(decode, sequence) for sequence in sequences]
        tables = {key[1]: table for key in keys if (table := self.proposer.table(key))}
        rows = [
            DraftRow(sequence=key[1], base=self.proposer.length(key), tokens=guess)
            for key, guess in zip(keys, self.proposer.propose(keys, self.max_proposal), strict=True)
            if guess
        ]
        if rows:
            self._num_proposals.inc(len(rows))
            self._num_tokens.inc(sum(len(row.tokens) for row in rows))
            for row in rows:
                self.notes.proposed((decode, row.sequence), len(row.tokens))
            self.send(decode, Proposals(draft=self.ref, rows=rows, tables=tables))

    def presence(self, state: WorkerState) -> Presence:
        held = len(self.proposer)
        return Presence(
            worker=self.ref,
            state=state,
            model=self.config.served_name,
            running=held,
            waiting=len(self._queue),
            credits=self.proposer.max_sequences - held if state == "ready" else 0,
            http_port=self.http_port,
            drafting=Drafting(self.config.draft_model.rstrip("/").rpartition("/")[2], round(self._busy.share(self.clock()), 3)),
        )

    def tick(self, now: float) -> None:
        """Free the mirrors of decode workers that were never heard to live, or are silent since they were lost; and those
        that nothing was heard of for a lease."""
        for decode, heard_at in list(self._heard_at.items()):
            known = self.registry.get(decode.id)
            if (known is None or known.worker != decode) and now - heard_at > self.config.dead_after_s:
                self._forget(decode)
        for key, updated_at in list(self._updated_at.items()):
            if now - updated_at <= self.config.lease_s:
                break
            self._close(key)

    def connection_changed(self, connected: bool) -> None:
        if connected:
            self._forget_all()

    def peer_lost(self, peer: Presence) -> None:
        if peer.worker.role == "decode":
            self._forget(peer.worker)

    def fenced(self) -> None:
        self._forget_all()

    def _forget_all(self) -> None:
        self._queue.clear()
        self._heard_at.clear()
        self._updated_at.clear()
        self.notes.all_closed(self.clock())
        self.proposer.clear()

    def _close(self, key: MirrorKey) -> None:
        self._updated_at.pop(key, None)
        self.notes.closed(key, self.clock())
        self.proposer.close(key)

    def _forget(self, decode: WorkerRef) -> None:
        self._queue = deque((message for message in self._queue if message.decode != decode), MAX_QUEUED)
        self._heard_at.pop(decode, None)
        closed = self.proposer.close_worker(decode)
        if closed:
            log.info("mirrors_freed", decode=decode.id, sequences=closed)
