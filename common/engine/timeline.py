"""What happened to one request on a worker, as typed events: spans of a trace and `penstock explain` are made of them. Pure.

admitted ─► copied (from a store, or from the prefill worker) ─► steps: chunks of the prompt, the first token, the last one
         │  └► shared prefix (waited for: another request computed it) ─┘
         └► handed off (prefill) ─► left
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from common.protocol.explain_messages import WorkerEvent as Event
from common.protocol.handles import WorkerRef
from common.protocol.trace_context import child_of
from common.runtime.spans import Fact, Span

MAX_EVENTS = 64
"""What is kept of a prompt of many chunks: the first event and the latest ones. Hand-offs that were refused one after the
other go first."""
COPIES = ("pull", "prefix")
SHARED = "shared prefix"
MAX_PEERS = 8
"""Kvstores and draft workers of one attempt that are remembered."""
DRAFTED = "drafted"
"""The reason of tokens that are recomputed although a hand-off brought their KV: a head reads their hidden states."""
MOVED = "moved"
"""Why tokens are computed again where no hand-off failed: the request was continued from another worker."""


class Timeline:
    """A request's on one worker. Outputs that it came with are not this worker's. `local_tokens`: what its prefix cache had.

    `known_tokens`: KV of the first so many tokens had been computed when the request came, here or elsewhere; those of them
    that are computed here are `num_recomputed`, and `reason` says why. `num_caught_up`: tokens that others computed for it
    meanwhile, here. `peers`: kvstores and draft workers that were asked.
    """

    __slots__ = (
        "_num_cached",
        "_num_counted",
        "_num_outputs",
        "admitted_at",
        "error",
        "events",
        "finished_at",
        "first_token_at",
        "known_tokens",
        "local_tokens",
        "num_caught_up",
        "num_computed",
        "num_recomputed",
        "num_steps",
        "peers",
        "reason",
        "started_at",
    )

    def __init__(self, now: float, num_computed: int, num_outputs: int, *, num_cached: int = 0, known_tokens: int = 0) -> None:
        self.admitted_at = now
        self.started_at = self.first_token_at = self.finished_at = 0.0
        self.events: list[Event] = []
        self.num_steps = 0
        self.error = ""
        self.local_tokens = self.num_computed = num_computed
        self._num_outputs = num_outputs
        self._num_cached = num_cached
        self.known_tokens = known_tokens
        self.num_recomputed = self.num_caught_up = self._num_counted = 0
        self.reason = MOVED
        self.peers: list[WorkerRef] = []

    @property
    def was_handed_off(self) -> bool:
        """Whether its KV was to come from a prefill worker: its prefix is not looked up here."""
        return any(event.name == "pull" for event in self.events)

    def note(self, event: Event) -> None:
        if len(self.events) >= MAX_EVENTS:
            pairs = enumerate(itertools.pairwise(self.events), 1)
            refused = (index for index, (before, later) in pairs if before.name == later.name == "hand-off")
            del self.events[next(refused, 1)]
        self.events.append(event)

    def asked(self, peers: Iterable[WorkerRef]) -> None:
        """These kvstores or draft workers have been asked about it."""
        self.peers = list(dict.fromkeys([*self.peers, *peers]))[:MAX_PEERS]

    def copied(self, event: Event, num_computed: int, num_cached: int = 0) -> None:
        """KV was copied here, or was not: then `event` has an error."""
        self.note(event)
        self.num_computed, self._num_cached = num_computed, num_cached
        if event.error and event.name == "pull":
            self.reason = event.error

    def preempted(self, now: float, num_computed: int, num_lost: int) -> None:
        """Its blocks had been given to others; it goes on with KV of `num_computed` tokens and computes `num_lost` again."""
        self.num_recomputed += num_lost
        self._num_counted, self.num_computed = num_computed + num_lost, num_computed
        self.note(Event("preempted", now, now, facts=(("recomputed_tokens", num_lost),)))

    def speculated(self, now: float, facts: tuple[tuple[str, int], ...]) -> None:
        """Note what speculation came to so far, instead of what was noted before."""
        began_at = self.first_token_at or self.admitted_at
        self.events = [event for event in self.events if event.name != "speculation"]
        self.note(Event("speculation", began_at, max(began_at, self.finished_at or now), facts=facts))

    def stepped(self, began_at: float, now: float, num_computed: int, num_outputs: int, num_cached: int = 0) -> None:
        """A step has been committed, perhaps without this request. `num_cached`: tokens that were found computed, so far."""
        caught_up, self._num_cached = max(0, num_cached - self._num_cached), max(num_cached, self._num_cached)
        self.num_caught_up += caught_up
        if caught_up:
            since = self.events[-1].ended_at if self.events else self.admitted_at
            self.note(Event(SHARED, since, max(since, began_at), num_tokens=caught_up))
        start = self.num_computed + caught_up
        self.num_recomputed += max(0, min(num_computed, self.known_tokens) - max(start, self._num_counted))
        computed, self.num_computed = num_computed - start, num_computed
        generated, self._num_outputs = num_outputs - self._num_outputs, num_outputs
        if computed <= 0 and generated <= 0:
            return
        self.num_steps += 1
        self.started_at = self.started_at or began_at
        if not self.first_token_at:
            # several tokens: proposals held, or the end of the prompt was recomputed for a head
            name = "first step" if generated and (computed <= generated or self.reason == DRAFTED) else "chunk"
            self.note(Event(name, began_at, now, num_tokens=computed))
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
        facts={**facts, **_kv_facts(line), "penstock.steps": line.num_steps},
        error=line.error,
    )
    copied_at = max((event.ended_at for event in line.events if event.name in COPIES), default=line.admitted_at)
    yield Span(name="queue", parent=own, began_at=copied_at, ended_at=max(copied_at, line.started_at or ended_at))
    for event in line.events:
        told: dict[str, Fact] = {}
        if event.num_tokens:
            told["penstock.tokens"] = event.num_tokens
        if event.num_bytes:
            told["penstock.bytes"] = event.num_bytes
        if event.peer:
            told["penstock.peer"] = event.peer
        told |= {f"penstock.{name}": value for name, value in event.facts}
        yield Span(name=event.name, parent=own, began_at=event.began_at, ended_at=event.ended_at, facts=told, error=event.error)
    if role == "decode" and line.first_token_at:
        yield Span(name="decode", parent=own, began_at=line.first_token_at, ended_at=max(line.first_token_at, ended_at))


def _kv_facts(line: Timeline) -> dict[str, Fact]:
    """What came over a hand-off and what was computed again, where there was anything to receive."""
    pulls = [event for event in line.events if event.name == "pull"]
    if not pulls and not line.num_recomputed:
        return {}
    return {
        "penstock.received_tokens": sum(event.num_tokens for event in pulls),
        "penstock.received_bytes": sum(event.num_bytes for event in pulls),
        "penstock.recomputed_tokens": line.num_recomputed,
    }
