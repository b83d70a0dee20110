"""What happened to one request on a worker, as typed events: spans of a trace and `penstock explain` are made of them. Pure.

admitted ─► copied (from a store, or from the prefill worker) ─► steps: chunks of the prompt, the first token, the last one
         ─► handed off (prefill) ─► left
"""

from __future__ import annotations

from collections.abc import Iterator

from common.protocol.explain_messages import WorkerEvent as Event
from common.protocol.trace_context import child_of
from common.runtime.spans import Fact, Span

MAX_EVENTS = 64
"""What is kept of a prompt of many chunks: the first event and the latest ones."""
COPIES = ("pull", "prefix")


class Timeline:
    """A request's on one worker. Outputs that it came with are not this worker's. `local_tokens`: what its prefix cache had."""

    __slots__ = (
        "_num_outputs",
        "admitted_at",
        "error",
        "events",
        "finished_at",
        "first_token_at",
        "local_tokens",
        "num_computed",
        "num_steps",
        "started_at",
    )

    def __init__(self, now: float, num_computed: int, num_outputs: int) -> None:
        self.admitted_at = now
        self.started_at = self.first_token_at = self.finished_at = 0.0
        self.events: list[Event] = []
        self.num_steps = 0
        self.error = ""
        self.local_tokens = self.num_computed = num_computed
        self._num_outputs = num_outputs

    def note(self, event: Event) -> None:
        if len(self.events) >= MAX_EVENTS:
            del self.events[1]
        self.events.append(event)

    def copied(self, event: Event, num_computed: int) -> None:
        """KV was copied here, or was not: then `event` has an error."""
        self.note(event)
        self.num_computed = num_computed

    def stepped(self, began_at: float, now: float, num_computed: int, num_outputs: int) -> None:
        """A step has been committed, perhaps without this request."""
        computed, self.num_computed = num_computed - self.num_computed, num_computed
        generated, self._num_outputs = num_outputs - self._num_outputs, num_outputs
        if computed <= 0 and generated <= 0:
            return
        self.num_steps += 1
        self.started_at = self.started_at or began_at
        if not self.first_token_at:
            self.note(Event("first step" if generated and computed <= 1 else "chunk", began_at, now, num_tokens=computed))
            if generated:
                self.first_token_at = now


def spans_of(line: Timeline, *, parent: str, role: str, worker: str, facts: dict[str, Fact], now: float) -> Iterator[Span]:
    """The spans of a request that leaves this worker. `parent`: the traceparent of its attempt."""
    ended_at = line.finished_at or now
    own = child_of(parent, worker)
    yield Span(
        name=f"{role} worker",
        parent=parent,
        own=own,
        began_at=line.admitted_at,
        ended_at=ended_at,
        facts={**facts, "penstock.steps": line.num_steps},
        error=line.error,
    )
    copied_at = max((event.ended_at for event in line.events if event.name in COPIES), default=line.admitted_at)
    yield Span(name="queue", parent=own, began_at=copied_at, ended_at=max(copied_at, line.started_at or ended_at))
    for event in line.events:
        told: dict[str, Fact] = {}
        if event.num_tokens:
            told["penstock.tokens"] = event.num_tokens
        if event.peer:
            told["penstock.peer"] = event.peer
        yield Span(name=event.name, parent=own, began_at=event.began_at, ended_at=event.ended_at, facts=told, error=event.error)
    if role == "decode" and line.first_token_at:
        yield Span(name="decode", parent=own, began_at=line.first_token_at, ended_at=max(line.first_token_at, ended_at))
