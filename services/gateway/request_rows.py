"""Requests of a gateway as the dashboard shows them: what became of each, never what it says. Pure: `now` is an argument.

An id of a request lets whoever has it cancel the request over NATS, so only its beginning is shown (`shown_name`).
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from services.gateway.actions import State
from services.gateway.history import Step
from services.gateway.requests import Request

MAX_RUNNING = 30
MAX_ENDED = 500
"""Requests that are remembered after their end."""
MAX_RECENT = 40
"""Of these, how many a page is given when it opens."""
MAX_NAME = 64

_MINTED = re.compile(r"(?P<start>[a-z]+[-_][0-9a-f]{8})[0-9a-f]{8,}(?P<choice>-[0-9]+)?")
_MAX_WHOLE_NAME = 20
_COMMON_START = len("msg_00000000")
"""Characters that an id and its shown name begin with, both."""


class StepRow(msgspec.Struct, array_like=True):
    """See `Step`. `at_ms`: since the request's arrival. Workers are ids, empty for none."""

    at_ms: float
    state: str
    attempt: int
    prefill: str
    decode: str
    reason: str


class RequestRow(msgspec.Struct, kw_only=True):
    """`number` grows with each request that ends, 0 before. `age_ms`: to now, or to its end. `first_token_ms`: None before it.
    `finish` is a finish reason or "error", with the error's code in `code`; both are empty while the request runs."""

    name: str
    model: str
    state: str
    age_ms: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    max_tokens: int
    first_token_ms: float | None
    steps: list[StepRow]
    finish: str = ""
    code: str = ""
    number: int = 0


class Flow(msgspec.Struct):
    """How many requests are in each state, and the tokens that they have."""

    queued: int = 0
    placing: int = 0
    prefilling: int = 0
    handing_off: int = 0
    decoding: int = 0
    tokens: int = 0


class EndedRequests:
    """The last MAX_ENDED that ended, and what all that ever did add up to. Canaries are left out."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.tokens = 0
        self._rows: deque[RequestRow] = deque(maxlen=MAX_ENDED)

    def add(self, request: Request, model: str, now: float) -> None:
        if is_canary(request):
            return
        self.num_ended += 1
        self.tokens += len(request.tokens)
        row = request_row(request, model, now)
        row.number = self.num_ended
        self._rows.append(row)

    def since(self, number: int) -> Iterator[RequestRow]:
        """Those after the one of this number, the latest MAX_RECENT at most, oldest first."""
        fresh = max(0, min(self.num_ended - number, MAX_RECENT, len(self._rows)))
        return itertools.islice(self._rows, len(self._rows) - fresh, None)

    def find(self, name: str) -> RequestRow | None:
        return next((row for row in reversed(self._rows) if row.name == name), None)


def flow_of(requests: Iterable[Request]) -> Flow:
    """A microsecond for some five requests."""
    counts = [0] * len(State)
    tokens = 0
    for request in requests:
        if request.only is None:
            counts[request.state] += 1
            tokens += len(request.tokens)
    return Flow(*counts[: State.DONE], tokens=tokens)


def newest(requests: dict[str, Request], model: str, now: float) -> list[RequestRow]:
    """The MAX_RUNNING that came last, newest first."""
    clients = (request for request in reversed(requests.values()) if not is_canary(request))
    return [request_row(request, model, now) for request in itertools.islice(clients, MAX_RUNNING)]


def find(requests: dict[str, Request], name: str) -> Request | None:
    """The request that is shown under this name."""
    start = name[:_COMMON_START]
    for request in requests.values():
        client_id = request.client_id
        if client_id.startswith(start) and shown_name(client_id) == name:
            return request
    return None


def is_canary(request: Request) -> bool:
    return request.only is not None


def request_row(request: Request, model: str, now: float) -> RequestRow:
    """`now`: for one that has ended, its end."""
    transcript = request.transcript
    began = request.arrived_at
    return RequestRow(
        name=shown_name(request.client_id),
        model=model,
        state=request.state.name.lower(),
        age_ms=_ms(now - began),
        prompt_tokens=request.prompt_tokens,
        cached_tokens=max(transcript.cached_tokens, 0),
        tokens=len(request.tokens),
        max_tokens=request.sampling.max_tokens,
        first_token_ms=_ms(request.first_token_at - began) if request.tokens else None,
        steps=_steps(request.history.steps, began),
        finish="error" if transcript.error is not None else transcript.finish or "",
        code=transcript.error.code if transcript.error is not None else "",
    )


def shown_name(client_id: str) -> str:
    """Return the part of an id that names the request on a page and does not let anyone cancel it.

    >>> shown_name("chatcmpl-00112233445566778899aabb-1")
    'chatcmpl-00112233-1'
    """
    minted = _MINTED.fullmatch(client_id)
    if minted is not None:
        return minted["start"] + (minted["choice"] or "")
    return client_id if len(client_id) <= _MAX_WHOLE_NAME else client_id[:_MAX_WHOLE_NAME] + "…"


def _steps(steps: Sequence[Step], began: float) -> list[StepRow]:
    return [
        StepRow(
            _ms(step.at - began),
            step.state.name.lower(),
            step.attempt,
            "" if step.prefill is None else step.prefill.id,
            "" if step.decode is None else step.decode.id,
            step.reason,
        )
        for step in steps
    ]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
