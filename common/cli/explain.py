"""`penstock explain <request-id>`: what happened to one request, over all services, in milliseconds since its arrival."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

import anyio
import msgspec
import typer

from common.cli.client import connected
from common.cli.console import DEFAULT_NATS_URL, NatsUrl, out, run
from common.cli.sizes import size_text
from common.protocol import headers, subjects
from common.protocol.errors import Forbidden, NotFound, NoWorkers, PenstockError, ProtocolError, RequestTimeout, from_wire
from common.protocol.explain_messages import Candidate, ExplainedEvent, Explanation, Explanations
from common.runtime.bus import Bus, BusMessage
from common.runtime.routing import is_no_responders

WAIT_S = 4.0
"""Seconds to wait for any gateway's answer."""
OTHERS_S = 1.5
"""Seconds to wait for other gateways once one has said that it does not know the request."""

Fact = str | int | float


def command(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST-ID", help="The `id` of its answer, its x-request-id, or a batch line's id.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the timeline as JSON.")] = False,
    nats_url: NatsUrl = DEFAULT_NATS_URL,
) -> None:
    """One request's timeline over all services, while it runs and for a while after its end."""

    async def show() -> None:
        async with connected(nats_url, "explain") as bus:
            answer = await ask(bus, request)
        if as_json:
            out.print(msgspec.json.format(msgspec.json.encode(answer)).decode(), markup=False)
            return
        for number, one in enumerate(answer.requests):
            if number:
                out.print()
            for line in lines(one):
                out.print(line, markup=False)

    run(show)


async def ask(bus: Bus, request: str, *, wait_s: float = WAIT_S, others_s: float = OTHERS_S) -> Explanations:
    """Ask every gateway on the bus, and return the answer of the one that knows the request.

    :raises NotFound: no gateway knows it. :raises NoWorkers: there is no gateway. :raises RequestTimeout: none answered.
    :raises Forbidden: this user of the bus may not ask. :raises PenstockError: another error that a gateway told.
    """
    send, receive = anyio.create_memory_object_stream[BusMessage](math.inf)
    inbox = bus.new_inbox()
    subject = subjects.explain()
    if bus.tenant:
        subject = subjects.of_tenant(bus.tenant, subject)
    subscription = await bus.subscribe(inbox, send.send_nowait)
    failure: PenstockError | None = None
    try:
        await bus.publish(subject, msgspec.json.encode({"request": request}), reply=inbox)
        ends_at = anyio.current_time() + wait_s
        while (left_s := ends_at - anyio.current_time()) > 0:
            message = None
            with anyio.move_on_after(left_s):
                message = await receive.receive()
            if message is None:
                break
            if is_no_responders(message):
                raise NoWorkers("no gateway on this bus: start one with `penstock up`, or name another bus with --nats-url")
            answer = _read(message)
            if isinstance(answer, Explanations):
                return answer
            failure = answer if failure is None or isinstance(failure, NotFound) else failure
            ends_at = min(ends_at, anyio.current_time() + others_s)
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(1):
            await subscription.unsubscribe()
        send.close()
        receive.close()
    if failure is None and getattr(bus, "denied", ()):
        raise Forbidden("this user of the bus may not ask what became of requests: use the client's or a tenant's credentials")
    if failure is None:
        raise RequestTimeout(f"no gateway answered within {wait_s:g} s: look at `penstock status`")
    if isinstance(failure, NotFound):
        raise NotFound(f"no gateway knows a request {request[:100]!r}: the id is wrong, or it ended too long ago")
    raise failure


def _read(message: BusMessage) -> Explanations | PenstockError:
    """:raises ProtocolError: a gateway of another kind answered."""
    if code := message.headers.get(headers.ERROR_CODE):
        return from_wire(code, message.headers.get(headers.ERROR, code))
    try:
        return msgspec.json.decode(message.data, type=Explanations)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the gateway sent what is no timeline: {error}") from error


def lines(one: Explanation) -> Iterator[str]:
    """Return a timeline as lines of text: times in ms since the arrival, durations, which process, what."""
    name = one.id if one.shown_id in ("", one.id) else f"{one.id} ({_plain(one.shown_id)})"
    yield f"{name}  {one.model}" + (f"  tenant {one.tenant}" if one.tenant else "")
    yield _summary(one)
    width = max([len(event.worker) for event in one.events], default=0)
    names = max([len(event.event) for event in one.events], default=0)
    attempts = max([event.attempt for event in one.events], default=0) > 1
    yield f"{'ms':>10} {'took':>9}  " + ("try  " if attempts else "") + f"{'where':<{width}}  what"
    for event in one.events:
        took = "" if event.duration_ms is None else f"{event.duration_ms:.1f}"
        attempt = f"{event.attempt or '':>3}  " if attempts else ""
        told = f"{event.event:<{names}}  {_told(event)}".rstrip()
        yield f"{event.at_ms:>10.1f} {took:>9}  {attempt}{event.worker:<{width}}  {told}"
        margin = " " * (24 + len(attempt) + width + names + 2)
        yield from (f"{margin}{line}" for line in _compared(event.candidates))
    for worker, reason in sorted(one.silent.items()):
        yield f"not heard: {worker} ({reason})"


def _summary(one: Explanation) -> str:
    prompt = f"{one.prompt_tokens} prompt tokens ({one.cached_tokens} cached), {one.output_tokens} generated"
    first = "" if one.first_token_ms is None else f", the first after {one.first_token_ms:.1f} ms"
    if not one.finish:
        return f"{prompt}{first}; {one.state.replace('_', ' ')} for {one.duration_ms:.1f} ms so far"
    return f"{prompt}{first}; ended with {one.code or one.finish} after {one.duration_ms:.1f} ms"


def _told(event: ExplainedEvent) -> str:
    facts = dict(event.facts)
    if event.event == "routed":
        way = " → ".join(str(facts[role]) for role in ("prefill", "decode") if role in facts)
        reason = f": {facts['reason']}" if facts.get("reason") else ""
        uncached = f" ({facts['uncached_tokens']} tokens to compute)" if "uncached_tokens" in facts else ""
        return f"{way}{reason}{uncached}"
    return ", ".join(_fact(name, value) for name, value in facts.items())


def _fact(name: str, value: Fact) -> str:
    """Return a fact in words: `received_bytes` 2097152 → `received 2.0 MiB`."""
    if name.endswith("_bytes") and not isinstance(value, str):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {size_text(int(value))}"
    return f"{name.replace('_', ' ')} {value}"


def _compared(candidates: list[Candidate]) -> Iterator[str]:
    for each in candidates:
        more = f", first token after {each.ttft_ms:.0f} ms" if each.ttft_ms else ""
        more += f", {each.cached_tokens} tokens cached" if each.cached_tokens else ""
        chosen = "  ← chosen" if each.chosen else ""
        yield f"{each.part} on {each.worker}: {each.cost_ms:.1f} ms{more}{chosen}"


def _plain(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
