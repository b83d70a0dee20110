"""The mixed load: what each request must answer, found out beforehand, and clients that ask for all of it at random."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import msgspec

from bench.mixed_load.answers import Answer, differences
from bench.mixed_load.asks import Ask, keeps_form, with_stop
from bench.mixed_load.clients import Edge, HttpClient, NatsClient, Result
from bench.mixed_load.outages import Outages, verdict
from bench.mixed_load.tally import End, Tally
from common.protocol.errors import ConfigError

LEAVING = 0.06
"""The share of streams whose client leaves before the end."""
NATS_SHARE = 0.4
ALIAS_SHARE = 0.2
BACK_OFF_S = 1.0


class Known(msgspec.Struct, frozen=True):
    """A request, and what each model answers."""

    ask: Ask
    answers: Mapping[str, Answer]


class Tenant(msgspec.Struct, frozen=True):
    name: str
    http: HttpClient
    nats: NatsClient

    async def send(self, edge: Edge, ask: Ask, model: str, *, stream: bool, leave_after: int = 0) -> Result:
        """Send `ask` to `model`."""
        body: dict[str, Any] = {**ask.body, "model": model, "stream": stream}
        if stream and ask.view in ("chat", "completions"):
            body["stream_options"] = {"include_usage": True}
        client = self.http if edge == "http" else self.nats
        return await client.send(ask.view, body, leave_after=leave_after)


async def learn(tenant: Tenant, asks: Sequence[Ask], models: Sequence[str]) -> list[Known]:
    """Ask everything once, alone and in one piece, and with a stop string from what was answered.

    :raises ConfigError: a request was not answered, or answers tell too little: two models say the same.
    """
    known: list[Known] = []
    for ask in asks:
        known.append(Known(ask, {model: await _learn(tenant, ask, model) for model in models}))
        if ask.kind in ("chat", "completion", "message"):
            for model in models:
                stopped = with_stop(ask, known[-1].answers[model].choices[0].text)
                if stopped is not None:
                    known.append(Known(stopped, {each: await _learn(tenant, stopped, each) for each in models}))
                    break
    for each in known:
        said = [answer.choices for answer in each.answers.values()]
        if len(set(said)) < len(said) and each.ask.kind not in ("chat, JSON schema", "chat, tools"):
            raise ConfigError(f"two models answer the same: {each.ask.kind} {said[0]!r:.200}")
    return known


async def _learn(tenant: Tenant, ask: Ask, model: str) -> Answer:
    result = await tenant.send("http", ask, model, stream=False)
    if result.answer is None:
        raise ConfigError(f"{ask.kind} was not answered by {model}: {result}")
    if not keeps_form(ask, result.answer):
        raise ConfigError(f"{ask.kind} was not answered in its form by {model}: {result.answer}")
    return result.answer


class Traffic:
    """Clients that send what is `known`, each one request at a time, and check every answer."""

    def __init__(self, tenants: Sequence[Tenant], known: Sequence[Known], outages: Outages, tally: Tally, seed: int) -> None:
        self._tenants = tenants
        self._known = known
        self._outages = outages
        self._tally = tally
        self._rng = random.Random(seed)

    async def client(self, think_s: float, end: End) -> None:
        """Send one request after the other, with pauses of `think_s` in the mean."""
        rng = random.Random(self._rng.random())
        while not end.is_over:
            await anyio.sleep(rng.expovariate(1 / think_s))
            if not await self._one(rng):
                await anyio.sleep(BACK_OFF_S)

    async def _one(self, rng: random.Random) -> bool:
        """Return whether it was answered."""
        tenant, known = rng.choice(self._tenants), rng.choice(self._known)
        model = rng.choice(sorted(known.answers))
        edge: Edge = "nats" if rng.random() < NATS_SHARE else "http"
        name = f"{model}-too" if edge == "http" and rng.random() < ALIAS_SHARE else model
        stream = rng.random() < 0.6
        leave_after = rng.randrange(1, 12) if stream and rng.random() < LEAVING else 0
        began = time.monotonic()
        result = await tenant.send(edge, known.ask, name, stream=stream, leave_after=leave_after)
        ended = time.monotonic()
        way = f"{edge}{', streamed' if stream else ''}"
        what = f"{known.ask.kind}, {way}, {tenant.name}, {name}, {ended - began:.1f} s"
        if result.answer is not None:
            wrong = differences(known.answers[model], result.answer, model=name)
            if wrong:
                others = [
                    each for each, answer in known.answers.items() if each != model and answer.choices == result.answer.choices
                ]
                self._tally.fault("wrong model" if others else "wrong answer", f"{what}: {'; '.join(wrong)}")
            else:
                self._tally.answered[known.ask.kind] += 1
                self._tally.by_edge[way] += 1
            return True
        if result.ending == "left":
            self._tally.by_edge[f"{edge}, client left"] += 1
            return True
        excuse = verdict(result, edge, began, ended, self._outages.struck)
        if excuse:
            self._tally.excused[excuse] += 1
        else:
            self._tally.fault(f"{result.ending} {result.code}".strip(), f"{what}: {result.status} {result.detail}")
        return False
