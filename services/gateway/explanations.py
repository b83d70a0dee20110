"""What a gateway remembers of requests for `penstock explain`, and the timeline that it and workers' records make. Pure.

    ended ─► Ended in a ring ─┐
    running ─► Ended, so far ─┴► find ─► (workers are asked) ─► explanation: one list of events, by time

Records share the typed events that spans are made of (`History` here, `Timeline` at workers); nothing is computed before
somebody asks. The ring holds the last MAX_ENDED requests: some 4 MB as a rule, 30 MB if each of them moved fifty times. No
text and no token is in it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from common.protocol.explain_messages import Candidate, Explained, ExplainedEvent, Explanation, WorkerEvent, WorkerRecord
from common.protocol.handles import WorkerRef
from services.gateway.actions import State
from services.gateway.batches.results import LINE_ID_PREFIX, line_id
from services.gateway.generation import READING
from services.gateway.history import STALL_NOTED_S, History, Route, Step
from services.gateway.request_rows import is_canary
from services.gateway.requests import Request
from services.gateway.routes import WORDS

MAX_ENDED = 1024
"""Requests that are remembered after their end."""
MAX_CHOICES = 64
"""Of one request, how many choices or prompts are explained."""

_PART = re.compile(rf"(-[0-9]{{1,5}})?({READING})?$")
"""What a client's id ends with in one of its requests: the number of a choice, and whether that one reads the prompt."""
_NAMES = {
    State.PREFILLING: "accepted",
    State.HANDING_OFF: "handing off",
    State.DECODING: "decoding",
}
_LOSSES = ("worker_lost", "no_responders")


class Ended(NamedTuple):
    """A request that has ended, or that is, until `state` is DONE, as it was at `ended_at`. Times are the gateway's clock's."""

    id: str
    client_id: str
    shown_id: str
    tenant: str
    model: str
    history: History
    state: State
    ended_at: float
    first_token_at: float
    last_token_at: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish: str
    code: str


class Told(NamedTuple):
    """A worker's answer. `offset_s`: what to add to its times to have the gateway's."""

    answer: Explained
    offset_s: float


def record_of(request: Request, model: str, now: float) -> Ended:
    transcript = request.transcript
    return Ended(
        request.id,
        request.client_id,
        request.shown_id,
        request.tenant,
        model,
        request.history,
        request.state,
        now,
        0.0 if request.given else request.first_token_at,
        request.silence.progressed_at,
        request.prompt_tokens + len(request.given),
        max(transcript.cached_tokens, 0),
        0 if request.given else len(request.tokens),
        "error" if transcript.error is not None else transcript.finish or "",
        "" if transcript.error is None else transcript.error.code,
    )


class Explanations:
    """The ring. Canaries are left out."""

    def __init__(self) -> None:
        self._ended: deque[Ended] = deque(maxlen=MAX_ENDED)

    def add(self, request: Request, model: str, now: float) -> None:
        """A request has ended."""
        if not is_canary(request):
            self._ended.append(record_of(request, model, now))

    def find(
        self, name: str, running: Iterable[tuple[str, dict[str, Request]]], now: float, tenant: str | None = None
    ) -> list[Ended]:
        """Return what is known under a name: the id in a request's answer, its x-request-id, its id in workers' logs, or the id
        of a batch's line. Of several requests that a client gave one name, the latest. Empty: none.
        `running`: the requests that run now, by the names of their models. `tenant`: only its own; None: anybody's."""
        found: list[Ended] = []
        base = ""
        for record in self._newest_first(name, running, now):
            if tenant is not None and record.tenant != tenant:
                continue
            own = _own_name(record, name)
            if found and own != base:
                continue
            base = own
            found.append(record)
            if len(found) == MAX_CHOICES:
                break
        return sorted(found, key=_place)

    def _newest_first(self, name: str, running: Iterable[tuple[str, dict[str, Request]]], now: float) -> Iterator[Ended]:
        for model, requests in running:
            for request in reversed(requests.values()):
                if _is_called(request, name) and not is_canary(request):
                    yield record_of(request, model, now)
        yield from (record for record in reversed(self._ended) if _is_called(record, name))


def _is_called(record: Ended | Request, name: str) -> bool:
    if name in (record.client_id, record.shown_id, record.id):
        return True
    if name.startswith(LINE_ID_PREFIX):
        return line_id(_base(record.client_id)) == name
    return _is_part(record.client_id, name)


def _is_part(client_id: str, name: str) -> bool:
    return client_id.startswith(name) and _PART.fullmatch(client_id, len(name)) is not None


def _base(client_id: str) -> str:
    return _PART.sub("", client_id, count=1)


def _own_name(record: Ended, name: str) -> str:
    """Return what all have in common that are asked for with this one."""
    if name == record.id:
        return record.client_id
    return name if _is_part(record.client_id, name) else _base(record.client_id)


def _place(record: Ended) -> tuple[int, str, bool]:
    """Choices by their number, and a prompt's reading before its answer."""
    choice = record.client_id.removesuffix(READING)
    return len(choice), choice, choice == record.client_id


def workers_of(record: Ended) -> list[WorkerRef]:
    """Return every worker that the request was given to."""
    found = [worker for step in record.history.steps for worker in (step.prefill, step.decode)]
    found += [worker for route in record.history.routes for worker in (route.prefill, route.decode)]
    return list(dict.fromkeys(worker for worker in found if worker is not None))


def holders_of(record: Ended) -> set[WorkerRef]:
    """Return the workers that took the request. The others refused it, or had no part in it before it went elsewhere."""
    held: set[WorkerRef | None] = set()
    for step in record.history.steps:
        if step.state in (State.PREFILLING, State.HANDING_OFF):
            held.add(step.decode if step.prefill is None else step.prefill)
        elif step.state is State.DECODING:
            held.add(step.decode)
    return {worker for worker in held if worker is not None}


def explanation(
    record: Ended, told: Iterable[Told], *, gateway: str, silent: Mapping[str, str], now: float, wall_s: float
) -> Explanation:
    """Return the timeline. `now` and `wall_s`: the same moment, on the gateway's clock and in seconds since 1970. `silent`: see
    `Explanation`."""
    began = _began(record)
    events = [*_own_events(record, gateway, began)]
    for answer, offset_s in told:
        for part in answer.records:
            events += _worker_events(part, answer.worker, began - offset_s)
    events.sort(key=lambda event: event.at_ms)
    return Explanation(
        id=record.client_id,
        shown_id=record.shown_id,
        model=record.model,
        gateway=gateway,
        received_at=round(wall_s - (now - began), 3),
        state=record.state.name.lower(),
        duration_ms=_ms(record.ended_at - began),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        first_token_ms=_ms(record.first_token_at - began) if record.first_token_at else None,
        finish=record.finish,
        code=record.code,
        tenant=record.tenant,
        events=events,
        silent=dict(silent),
    )


# -- the gateway's part


def _began(record: Ended) -> float:
    return min(record.history.received_at, record.history.steps[0].at)


def _own_events(record: Ended, gateway: str, began: float) -> Iterator[ExplainedEvent]:
    def event(
        at: float,
        name: str,
        attempt: int = 0,
        until: float | None = None,
        facts: dict[str, str | int | float] | None = None,
        candidates: list[Candidate] | None = None,
    ) -> ExplainedEvent:
        return ExplainedEvent(
            at_ms=_ms(at - began),
            event=name,
            service="gateway",
            worker=gateway,
            attempt=attempt,
            duration_ms=None if until is None else _ms(until - at),
            facts=facts or {},
            candidates=candidates or [],
        )

    history = record.history
    routes = {route.attempt: route for route in history.routes}
    yield event(began, "received", facts={"prompt_tokens": record.prompt_tokens})
    before: Step | None = None
    ends = [*(step.at for step in history.steps[1:]), record.ended_at]
    for step, until in zip(history.steps, ends, strict=True):
        if step.state is State.QUEUED:
            if before is not None:
                name = "moved" if step.reason in _LOSSES else "retried"
                yield event(step.at, name, step.attempt, facts={"error": step.reason, **_left(before)})
            yield event(step.at, "queued", step.attempt + 1, until)
        elif step.state is State.PLACING:
            route = routes.get(step.attempt)
            facts = _workers(step) if route is None else {**_workers(step), **_route_facts(route)}
            yield event(step.at, "routed", step.attempt, facts=facts, candidates=None if route is None else _candidates(route))
        else:
            yield event(step.at, _NAMES[step.state], step.attempt, until, _workers(step))
        before = step
    if record.first_token_at:
        yield event(record.first_token_at, "first token")
    for stall in history.stalls:
        yield event(stall.since, "stalled", stall.attempt, stall.until)
    if record.state is State.DONE:
        if record.output_tokens > 1:
            yield event(record.last_token_at, "last token", facts={"output_tokens": record.output_tokens})
        how: dict[str, str | int | float] = {"finish": record.finish}
        yield event(record.ended_at, "ended", facts={**how, "error": record.code} if record.code else how)
    elif record.state is State.DECODING and record.ended_at - record.last_token_at > STALL_NOTED_S:
        yield event(record.last_token_at, "stalled", history.steps[-1].attempt, record.ended_at)


def _workers(step: Step) -> dict[str, str | int | float]:
    pairs = (("prefill", step.prefill), ("decode", step.decode))
    return {role: worker.id for role, worker in pairs if worker is not None}


def _left(step: Step) -> dict[str, str | int | float]:
    """Which workers an attempt that ended in this state was with."""
    return {role: id for role, id in _workers(step).items() if role == "decode" or step.state is not State.DECODING}


def _route_facts(route: Route) -> dict[str, str | int | float]:
    path = "direct" if route.prefill is None else "read" if route.decode is None else "prefill"
    return {"path": path, "reason": WORDS[route.reason], "uncached_tokens": route.uncached_tokens}


def _candidates(route: Route) -> list[Candidate]:
    """Every worker that was compared, by part and cost."""
    prefill, decode = (worker.id if worker is not None else "" for worker in (route.prefill, route.decode))
    taken = {("prefill", prefill), ("decode", decode)} if prefill else {("direct", decode)}
    found = [
        Candidate(
            part=cost.part,
            worker=cost.worker,
            cost_ms=_ms(cost.cost_s),
            cached_tokens=cost.cached_tokens,
            chosen=(cost.part, cost.worker) in taken,
            ttft_ms=_ms(cost.ttft_s),
        )
        for cost in route.costs
    ]
    order = {"prefill": 0, "decode": 1, "direct": 2}
    return sorted(found, key=lambda candidate: (order[candidate.part], candidate.cost_ms, candidate.worker))


# -- the workers' part


def _worker_events(record: WorkerRecord, worker: WorkerRef, began: float) -> Iterator[ExplainedEvent]:
    """`began`: the request's arrival on the worker's clock."""

    def event(at: float, name: str, until: float | None = None, **facts: str | int | float) -> ExplainedEvent:
        return ExplainedEvent(
            at_ms=_ms(at - began),
            event=name,
            service=worker.role,
            worker=worker.id,
            attempt=record.attempt,
            duration_ms=None if until is None else _ms(until - at),
            facts=facts,
        )

    if worker.role in ("kvstore", "draft"):
        for each in record.events:
            yield event(each.began_at, each.name, each.ended_at, **_peer_facts(each))
        return
    was_pulled = any(each.name == "pull" for each in record.events)
    again = {"recomputed_tokens": record.recomputed_tokens} if record.recomputed_tokens and not was_pulled else {}
    yield event(record.admitted_at, "admitted", local_hit_tokens=record.local_tokens, **again)
    for each in record.events:
        facts: dict[str, str | int | float] = {}
        if each.error:
            facts["error"] = each.error
        if each.name == "pull":
            facts |= {"from": each.peer, "received_tokens": each.num_tokens, "received_bytes": each.num_bytes}
            facts |= {**dict(each.facts), "recomputed_tokens": record.recomputed_tokens}
            yield event(each.began_at, "KV received", each.ended_at, **facts)
        elif each.name == "prefix":
            facts |= {"kvstore_hit_tokens": each.num_tokens, **dict(each.facts)}
            if each.num_bytes:
                facts["received_bytes"] = each.num_bytes
            yield event(each.began_at, "kvstore", each.ended_at, **facts)
        elif each.name == "part":
            if worker.role == "decode":
                facts |= {"tokens": each.num_tokens, "from": each.peer, **dict(each.facts)}
                yield event(each.began_at, "KV part", each.ended_at, **facts)
            else:
                yield event(each.began_at, "KV part", tokens=each.num_tokens, to=each.peer)
        elif each.name == "hand-off":
            yield event(each.began_at, "hand-off", each.ended_at, **facts, to=each.peer, **dict(each.facts))
        elif each.name == "preempted":
            yield event(each.began_at, "preempted", **dict(each.facts))
        elif each.name == "speculation":
            yield event(each.began_at, "speculation", each.ended_at, **dict(each.facts))
        else:
            yield event(
                each.began_at, "prefill chunk" if each.name == "chunk" else each.name, each.ended_at, tokens=each.num_tokens
            )
    if record.first_token_at:
        yield event(record.first_token_at, "token computed")
    if record.finished_at:
        yield event(record.finished_at, "finished", output_tokens=record.output_tokens)
    if record.error:
        yield event(record.left_at or record.finished_at, "gave up", error=record.error)
    elif record.left_at and not record.finished_at:
        yield event(record.left_at, "let go")


def _peer_facts(event: WorkerEvent) -> dict[str, str | int | float]:
    """What a kvstore or a draft worker tells of something that it did."""
    facts: dict[str, str | int | float] = {"for": event.peer} if event.peer else {}
    facts |= dict(event.facts)
    if event.num_bytes:
        facts["copied_bytes"] = event.num_bytes
    return {**facts, "error": event.error} if event.error else facts


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
