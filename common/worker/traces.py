"""The traced requests of a worker: who notes what in their timelines, and when these become spans.

Requests that are not traced cost a comparison at each of these places. An engine worker calls all of them from its event loop.
"""

from __future__ import annotations

from collections.abc import Callable

from common.engine.sequence import Sequence
from common.engine.timeline import Event, Timeline, spans_of
from common.protocol.handles import WorkerRef
from common.runtime.spans import Fact
from common.runtime.tracing import Tracing


class WorkerTraces:
    """`me` is asked for each span: a worker takes a new epoch when it is fenced."""

    def __init__(self, tracing: Tracing, me: Callable[[], WorkerRef], clock: Callable[[], float]) -> None:
        self._tracing = tracing
        self._me = me
        self._clock = clock
        self._running: dict[Sequence, Timeline] = {}
        self._step_began_at = 0.0

    def admitted(self, sequence: Sequence) -> None:
        """A task has been accepted."""
        if sequence.generation.trace and self._tracing.enabled:
            line = Timeline(self._clock(), sequence.num_computed, sequence.num_outputs)
            self._running[sequence] = sequence.timeline = line

    def step_ended(self, elapsed_s: float) -> None:
        """A step that took so long has ended; it is committed next."""
        self._step_began_at = self._clock() - elapsed_s

    def committed(self) -> None:
        """That step's results are in the sequences."""
        if not self._running:
            return
        now = self._clock()
        for sequence, line in list(self._running.items()):
            line.stepped(self._step_began_at, now, sequence.num_computed, sequence.num_outputs)
            if sequence.finish is not None:
                line.finished_at = now
                del self._running[sequence]

    def copied(self, sequence: Sequence, name: str, began_at: float, peer: str = "", error: str = "") -> None:
        """A copy of KV for it has ended: `pull` from a prefill worker, or a `prefix` from a store."""
        if sequence.timeline is not None:
            event = Event(name, began_at, self._clock(), peer=peer, error=error)
            sequence.timeline.copied(event, sequence.num_computed)

    def handed_off(self, sequence: Sequence, began_at: float, peer: str, error: str = "") -> None:
        """A decode worker has taken it, or has not: then there is an error."""
        if sequence.timeline is not None:
            sequence.timeline.note(Event("hand-off", began_at, self._clock(), peer=peer, error=error))

    def failed(self, sequence: Sequence, code: str) -> None:
        """This worker gives it up."""
        if sequence.timeline is not None:
            sequence.timeline.error = code

    def left(self, sequence: Sequence) -> None:
        """It is held no more: export what happened to it."""
        line, sequence.timeline = sequence.timeline, None
        if line is None:
            return
        self._running.pop(sequence, None)
        now, me, generation = self._clock(), self._me(), sequence.generation
        facts: dict[str, Fact] = {
            "penstock.request.id": generation.request,
            "penstock.attempt": generation.attempt,
            "penstock.prompt_tokens": generation.prompt_tokens,
            "penstock.cached_tokens": max(sequence.num_cached, 0),
            "penstock.output_tokens": sequence.num_outputs,
        }
        self._tracing.record(spans_of(line, parent=generation.trace, role=me.role, worker=me.id, facts=facts, now=now), now)
