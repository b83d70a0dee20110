"""A request's spans at the gateway, from its history: where it waited, and what each attempt did. Pure.

request (the edge's, `server_span.py`)
  ├─ queue                              before each attempt
  └─ attempt                            workers' own spans are its children, too
       ├─ placement                     until a worker has accepted the task
       ├─ prefill                       until the first token came
       ├─ hand-off                      until the decode worker has the KV
       └─ decode                        until the last token came
"""

from __future__ import annotations

from collections.abc import Iterator

from common.protocol.handles import WorkerRef
from common.protocol.trace_context import child_of
from common.runtime.spans import Fact, Span
from services.gateway.actions import State
from services.gateway.history import Step
from services.gateway.requests import Request

_NAMES = {
    State.QUEUED: "queue",
    State.PLACING: "placement",
    State.PREFILLING: "prefill",
    State.HANDING_OFF: "hand-off",
    State.DECODING: "decode",
}


def spans_of(request: Request, ended_at: float) -> Iterator[Span]:
    """The spans of a request that has ended."""
    error = request.transcript.error
    code = "" if error is None else error.code
    steps = request.history.steps
    ends = [*steps[1:], None]
    attempt: list[tuple[Step, float]] = []
    for step, after in zip(steps, ends, strict=True):
        until = ended_at if after is None else after.at
        if step.state is State.QUEUED:
            yield Span(
                name=_NAMES[step.state],
                parent=request.trace,
                began_at=step.at,
                ended_at=until,
                facts={"penstock.attempt": step.attempt + 1},
                error=code if after is None else "",
            )
            continue
        attempt.append((step, until))
        if after is None or after.state in (State.QUEUED, State.PLACING):
            yield from _attempt_spans(request, attempt, code if after is None else after.reason)
            attempt = []


def _attempt_spans(request: Request, steps: list[tuple[Step, float]], error: str) -> Iterator[Span]:
    """One attempt. What ended it is told of the attempt, and of the part of it that was under way."""
    first, (last, ended_at) = steps[0][0], steps[-1]
    own = child_of(request.trace, f"{request.id}/{first.attempt}")
    yield Span(
        name="attempt",
        parent=request.trace,
        own=own,
        began_at=first.at,
        ended_at=ended_at,
        facts={
            "penstock.request.id": request.id,
            "penstock.attempt": first.attempt,
            **_worker("prefill", first.prefill),
            **_worker("decode", last.decode or first.decode),
        },
        error=error,
    )
    for step, until in steps:
        yield Span(
            name=_NAMES[step.state],
            parent=own,
            began_at=step.at,
            ended_at=until,
            error=error if step is last else "",
        )


def _worker(role: str, worker: WorkerRef | None) -> dict[str, Fact]:
    return {} if worker is None else {f"penstock.{role}.worker": worker.id}
