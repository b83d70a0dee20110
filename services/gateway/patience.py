"""What time does to a request: its deadline, a reader that stalls, workers that answer late or fall silent. Pure."""

from __future__ import annotations

from common.protocol import errors
from services.gateway.actions import NOTHING, Actions, State
from services.gateway.requests import Request


def tick(request: Request, now: float, *, patience_s: float = 0.0, stuck: bool = False) -> Actions:
    """Return what is due. `patience_s`: silence that is no stall, because its worker's steps take so long. `stuck`: that
    worker's engine makes no progress, so its answers are no sign of life."""
    request.stuck = stuck
    if now >= request.deadline:
        return request.end(None, errors.DeadlineExceeded("the request took longer than its deadline allows"))
    if request.transcript.unread_for(now) > request.limits.slow_reader_timeout_s:
        return request.end(None, errors.Cancelled("the client read nothing for too long"))
    if request.state is State.QUEUED or request.state is State.DONE:
        return NOTHING
    return _late(request, now, max(request.limits.stall_s, patience_s))


def _late(request: Request, now: float, stall_s: float) -> Actions:
    limits, silence, in_state_s = request.limits, request.silence, now - request.since
    match request.state:
        case State.PLACING:
            if in_state_s > limits.placing_timeout_s:
                return request.next_attempt(errors.RequestTimeout("no worker answered"), now, counted=True)
        case State.PREFILLING:
            if in_state_s > limits.prefill_timeout_s:
                return request.next_attempt(errors.RequestTimeout("the prompt took too long"), now, counted=True)
            if silence.lasts(now, 2 * stall_s):
                return request.fetch(now)
        case State.HANDING_OFF:
            if in_state_s > limits.handoff_timeout_s:
                late = errors.RequestTimeout("no decode worker took over")
                return request.next_attempt(late, now, counted=request.decode is not None)
            if silence.lasts(now, 2 * stall_s):
                return request.fetch(now)
        case _ if silence.gap and now - silence.progressed_at > stall_s * (limits.max_fetches + 1):
            return request.next_attempt(errors.WorkerLost("lost frames did not come again"), now, counted=True)
        case _ if silence.lasts(now, stall_s * (2 if silence.fetches else 1)):
            if silence.fetches >= limits.max_fetches:
                return _silenced(request, now)
            silence.fetches += 1
            return request.fetch(now)
        case _:
            pass
    return NOTHING


def _silenced(request: Request, now: float) -> Actions:
    """Go on elsewhere: the worker gives no tokens, however often it is asked."""
    request.avoid.update(worker.id for worker in request.holders)
    if request.stuck:
        request.losses.lost(produced=request.produced)
    return request.next_attempt(errors.WorkerLost("the worker fell silent"), now, counted=False)
