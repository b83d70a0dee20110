"""Requests of the gateway in any state, and what their actions amount to: for the tests of `services.gateway.requests`."""

from __future__ import annotations

from collections.abc import Iterable

from common.protocol.handles import WorkerRef
from common.protocol.messages import DecodeTask, FetchFrames, PrefillTask, SamplingParams, TokenFrame
from services.gateway.actions import Action, Ask, Free, Limits, State, Tell
from services.gateway.handoff import handed_off
from services.gateway.requests import GenerationRequest, Request

GATEWAY = WorkerRef("gateway", "gateway-1", 1)
P1, P2 = (WorkerRef("prefill", f"prefill-{n}", 1) for n in (1, 2))
D1, D2 = (WorkerRef("decode", f"decode-{n}", 1) for n in (1, 2))
PROMPT = [11, 12, 13]


def make(
    *,
    deadline_s: float = 60.0,
    max_tokens: int = 8,
    logprobs: int = -1,
    stop: Iterable[int] = (),
    background: bool = False,
    **limits,
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, stop_token_ids=list(stop))
    request = GenerationRequest(id="r", prompt=PROMPT, sampling=sampling, deadline_s=deadline_s, background=background)
    return Request(request, wire_id="r/1", gateway=GATEWAY, limits=Limits(**limits), now=0.0, wall_ms=1000)


def frame(request: Request, start: int, tokens: Iterable[int], **more) -> TokenFrame:
    attempt = more.pop("attempt", request.attempt)
    return TokenFrame(request=request.id, attempt=attempt, start=start, tokens=list(tokens), **more)


def freed(actions: Iterable[Action]) -> set[WorkerRef]:
    return {action.worker for action in actions if isinstance(action, Free)}


def kinds(actions: Iterable[Action]) -> set[type]:
    return {type(action) for action in actions}


def fetches(actions: Iterable[Action]) -> dict[WorkerRef, int]:
    return {a.worker: a.message.start for a in actions if isinstance(a, Tell) and isinstance(a.message, FetchFrames)}


def in_state(state: State) -> Request:
    """A request that has come as far as `state` on P1 and D1; it has one token from `handing_off` on."""
    request = make()
    if state is State.QUEUED:
        return request
    request.place(P1, D1, 0.0)
    if state is State.PLACING:
        return request
    request.accepted(P1, request.attempt, 0.0)
    if state is State.PREFILLING:
        return request
    request.frame(P1, frame(request, 0, [100]), 0.0)
    if state is State.HANDING_OFF:
        return request
    handed_off(request, request.attempt, D1, 0.0)
    assert request.state is State.DECODING
    return request


HOLDERS = {
    State.QUEUED: set(),
    State.PLACING: {P1, D1},
    State.PREFILLING: {P1, D1},
    State.HANDING_OFF: {P1, D1},
    State.DECODING: {P1, D1},
}


def next_task(request: Request, prefill: WorkerRef | None, decode: WorkerRef) -> PrefillTask | DecodeTask:
    (ask,) = request.place(prefill, decode, 1.0)
    assert isinstance(ask, Ask)
    assert isinstance(ask.message, PrefillTask | DecodeTask)
    return ask.message
