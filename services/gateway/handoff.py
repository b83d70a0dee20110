"""What becomes of a request at the handoff from prefill: it arrives, nobody takes it, or another worker is to. Pure."""

from __future__ import annotations

from common.protocol import errors
from common.protocol.handles import WorkerRef
from common.protocol.messages import Redirect
from services.gateway.actions import BEFORE_DECODING, NOTHING, Actions, Free, Reroute, State, Tell
from services.gateway.requests import Request


def handed_off(request: Request, attempt: int, decode: WorkerRef, now: float) -> Actions:
    """A decode worker has taken it over."""
    if attempt != request.attempt or decode != request.decode or request.state is State.DONE:
        return [Free(decode, attempt)]
    request.handed_over(now)
    return NOTHING


def handoff_failed(request: Request, worker: WorkerRef, attempt: int, code: str, now: float) -> Actions:
    """Look for another decode worker: the prefill worker keeps the KV and waits for a `Redirect`."""
    if (
        attempt != request.attempt
        or worker != request.prefill
        or request.state not in BEFORE_DECODING
        or request.decode is None
    ):
        return NOTHING
    refused = request.decode
    request.decode = None
    request.holders.discard(refused)
    request.enter(State.HANDING_OFF, now)
    error = errors.from_wire(code, "")
    request.is_too_long = isinstance(error, errors.ContextLengthExceeded)
    if request.is_too_long:  # one with a larger pool may take it
        return [Reroute()]
    if isinstance(error, (errors.OutOfCredits, errors.OutOfBlocks)):
        request.tried.discard(refused.id)
        return [Reroute()]
    # its answer may have been lost; and it must not be tried again, for this cancel would refuse this very attempt
    return [Free(refused, attempt), Reroute()]


def redirect(request: Request, decode: WorkerRef, now: float) -> Actions:
    """Have the KV handed to another decode worker."""
    assert request.prefill is not None and request.state is State.HANDING_OFF
    request.decode = decode
    request.holders.add(decode)
    request.tried.add(decode.id)
    request.since = now
    return [Tell(request.prefill, Redirect(request=request.id, attempt=request.attempt, decode=decode))]


def stranded(request: Request, now: float) -> Actions:
    """Begin again elsewhere: no other decode worker can ever read this KV. One that is too long for them ends here, as where a
    worker that computes the prompt itself says so: each attempt would give a token and fail again."""
    if request.is_too_long:
        if request.tokens:
            return request.end("length", None)
        return request.end(None, errors.ContextLengthExceeded("the prompt is longer than any decode worker's KV cache"))
    return request.next_attempt(errors.WorkerLost("no decode worker is left beside the KV"), now, counted=False)
