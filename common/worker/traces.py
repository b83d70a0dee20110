"""What happened to a worker's requests: who notes what in their timelines, and what becomes of these.

    admitted ─► timeline ─► copies, chunks, first token … ─► left ─► a record in a ring, for `penstock explain`
                                                                 └► spans, if it is traced

An engine worker calls all of this from its event loop. A request that is not traced is looked at in each step only until its
first token: later steps cost nothing. The ring holds the last MAX_RECORDS attempts, each of MAX_EVENTS events at most: some
1 MB as a rule, 16 MB at most. Nothing of a request's text is in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from common.engine.sequence import Sequence
from common.engine.timeline import Event, Timeline, spans_of
from common.protocol.explain_messages import Explained, WorkerRecord
from common.protocol.handles import WorkerRef
from common.runtime.spans import Fact
from common.runtime.tracing import Tracing
from common.worker.kv_counts import PREEMPTED, KvCounts

MAX_RECORDS = 2048
"""Attempts that are remembered after they have left this worker."""


class WorkerTraces:
    """`me` is asked for each span: a worker takes a new epoch when it is fenced. `kv`: told what steps computed again."""

    def __init__(
        self, tracing: Tracing, me: Callable[[], WorkerRef], clock: Callable[[], float], kv: KvCounts | None = None
    ) -> None:
        self._tracing = tracing
        self._kv = kv
        self._me = me
        self._clock = clock
        self._running: dict[Sequence, Timeline] = {}
        self._ended: deque[tuple[str, WorkerRecord]] = deque(maxlen=MAX_RECORDS)
        self._step_began_at = self._step_ended_at = 0.0

    def admitted(self, sequence: Sequence) -> None:
        """A task has been accepted."""
        line = Timeline(
            self._clock(),
            sequence.num_computed,
            _outputs(sequence),
            num_cached=sequence.num_cached,
            known_tokens=len(sequence.tokens) - 1 if sequence.num_outputs else 0,  # who generated them had the KV before them
        )
        self._running[sequence] = sequence.timeline = line

    def step_ended(self, elapsed_s: float) -> None:
        """A step that took so long has ended; it is committed next."""
        self._step_ended_at = self._clock()
        self._step_began_at = self._step_ended_at - elapsed_s

    def committed(self) -> None:
        """That step's results are in the sequences."""
        if not self._running:
            return
        now, exports = self._step_ended_at, self._tracing.enabled
        for sequence, line in list(self._running.items()):
            if sequence.num_computed == line.num_computed and sequence.finish is None:
                continue  # it was not in the step
            recomputed, caught_up = line.num_recomputed, line.num_caught_up
            line.stepped(self._step_began_at, now, _computed(sequence), _outputs(sequence), sequence.num_cached)
            if self._kv is not None and line.num_recomputed > recomputed:
                self._kv.recomputed(line.num_recomputed - recomputed, line.reason)
            if self._kv is not None and line.num_caught_up > caught_up and not line.was_handed_off:
                self._kv.found("own", line.num_caught_up - caught_up)
            if sequence.finish is not None:
                line.finished_at = now
                del self._running[sequence]
            elif line.first_token_at and not (exports and sequence.generation.trace):
                del self._running[sequence]

    def finished(self, sequence: Sequence) -> None:
        """Its last token is on its way to the gateway."""
        if sequence.timeline is not None and not sequence.timeline.finished_at:
            sequence.timeline.finished_at = self._clock()

    def copied(
        self,
        sequence: Sequence,
        name: str,
        began_at: float,
        *,
        num_tokens: int = 0,
        num_bytes: int = 0,
        peer: str = "",
        error: str = "",
        facts: tuple[tuple[str, int], ...] = (),
        asked: Iterable[WorkerRef] = (),
        parts: Iterable[Event] = (),
        ended_at: float = 0.0,
    ) -> None:
        """A copy of KV for it has ended: `pull` from a prefill worker, or a `prefix` from a store.

        asked: which stores. parts: copies that a stream brought before. ended_at: 0: now.
        """
        if sequence.timeline is not None:
            for part in parts:
                sequence.timeline.note(part)
            event = Event(name, began_at, ended_at or self._clock(), num_tokens, peer, error, num_bytes, facts)
            sequence.timeline.copied(event, sequence.num_computed, sequence.num_cached)
            sequence.timeline.asked(asked)

    def resumed(self, sequence: Sequence) -> None:
        """It was preempted and goes on now: what its cache did not find is computed again."""
        line = sequence.timeline
        if line is None:
            return
        computed = len(sequence.tokens) - 1 if line.first_token_at else line.num_computed
        num_lost = max(0, computed - sequence.num_computed)
        line.preempted(self._clock(), sequence.num_computed, num_lost)
        if self._kv is not None and num_lost:
            self._kv.recomputed(num_lost, PREEMPTED)

    def handed_off(self, sequence: Sequence, began_at: float, peer: str, error: str = "", *, sent_at: float = 0.0) -> None:
        """A decode worker has taken it, or has not: then there is an error. `sent_at`: when KvReady had been made."""
        if sequence.timeline is not None:
            facts = (("sent_us", round(1e6 * (sent_at - began_at))),) if sent_at else ()
            sequence.timeline.note(Event("hand-off", began_at, self._clock(), peer=peer, error=error, facts=facts))

    def failed(self, sequence: Sequence, code: str) -> None:
        """This worker gives it up."""
        if sequence.timeline is not None:
            sequence.timeline.error = code

    def left(self, sequence: Sequence) -> None:
        """It is held no more: remember what happened to it, and export that if it is traced."""
        line = sequence.timeline
        if line is None:
            return
        now, me, generation = self._clock(), self._me(), sequence.generation
        self._ended.append((generation.request, _record(sequence, line, now)))
        sequence.timeline = None
        self._running.pop(sequence, None)
        if not generation.trace or not self._tracing.enabled:
            return
        facts: dict[str, Fact] = {
            "penstock.request.id": generation.request,
            "penstock.attempt": generation.attempt,
            "penstock.prompt_tokens": _prompt_tokens(sequence),
            "penstock.cached_tokens": max(sequence.num_cached, 0),
            "penstock.output_tokens": _outputs(sequence),
        }
        self._tracing.record(spans_of(line, parent=generation.trace, role=me.role, worker=me.id, facts=facts, now=now), now)

    def explain(self, request: str, held: Sequence | None) -> Explained:
        """Return what is known of a request: of its attempts that have left, and of `held`, which has not."""
        records = [record for name, record in self._ended if name == request]
        if held is not None and held.timeline is not None:
            records.append(_record(held, held.timeline, 0.0))
        return Explained(worker=self._me(), now=self._clock(), records=records)


def _record(sequence: Sequence, line: Timeline, left_at: float) -> WorkerRecord:
    return WorkerRecord(
        attempt=sequence.generation.attempt,
        admitted_at=line.admitted_at,
        started_at=line.started_at,
        first_token_at=line.first_token_at,
        finished_at=line.finished_at,
        left_at=left_at,
        prompt_tokens=_prompt_tokens(sequence),
        local_tokens=line.local_tokens,
        cached_tokens=max(sequence.num_cached, 0),
        output_tokens=_outputs(sequence),
        error=line.error,
        events=line.events,
        recomputed_tokens=line.num_recomputed,
        peers=line.peers,
    )


def _computed(sequence: Sequence) -> int:
    """Return the tokens whose KV has been computed. One that has ended may have given its blocks back already, and the last
    token that was generated needs none."""
    if sequence.finish is None:
        return sequence.num_computed
    return sequence.length if sequence.is_read else len(sequence.tokens) - 1


def _prompt_tokens(sequence: Sequence) -> int:
    """Return the tokens of its prompt: of one that is read, all that are given."""
    return len(sequence.given) if sequence.is_read else sequence.generation.prompt_tokens


def _outputs(sequence: Sequence) -> int:
    """Return the tokens that were generated: of one that is read none, although it grows as it is scored."""
    return 0 if sequence.is_read else sequence.num_outputs
