"""Does a tenant find what another one has computed? A prefix that nobody ever sent tells.

one tenant sends it: nothing is cached ─► the other one: nothing ─► the other model: nothing ─► the first one again: a hit

The hit shows that there was something to find, so that the zeros before it mean something. Where a worker is lost while it
computes the prompt for the first time, the retry may find what the first attempt left in the store: that is no fault.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import anyio

from bench.mixed_load.asks import Ask, words
from bench.mixed_load.outages import Outages, verdict
from bench.mixed_load.tally import End, Tally
from bench.mixed_load.traffic import Tenant

PROMPT_TOKENS = (200, 1200)
MAX_TOKENS = 4
HITS = 3
"""How often the first tenant asks again, on the way to whichever worker."""


class SaltCheck:
    """Repeats the story above, with both tenants in either part."""

    def __init__(self, tenants: Sequence[Tenant], models: Sequence[str], outages: Outages, tally: Tally, seed: int) -> None:
        self._tenants = list(tenants)
        self._models = list(models)
        self._outages = outages
        self._tally = tally
        self._rng = random.Random(f"salts {seed}")

    async def run(self, every_s: float, end: End) -> None:
        while not end.is_over:
            await anyio.sleep(every_s)
            await self._story()

    async def _story(self) -> None:
        first, second = self._rng.sample(self._tenants, 2)
        model, other = self._rng.sample(self._models, 2)
        prompt = words(self._rng, self._rng.randrange(*PROMPT_TOKENS))
        steps = [(first, model), (second, model), (first, other)]
        for tenant, asked in steps:
            cached = await self._cached(tenant, asked, prompt)
            if cached is None:
                return
            self._tally.salts["must find nothing"] += 1
            if cached and (tenant, asked) == (first, model):
                self._tally.salts["first attempt found by its retry"] += 1
            elif cached:
                found = f"{tenant.name} found {cached} tokens at {asked}, of {first.name} at {model}"
                self._tally.fault("prefix hit across salts", found)
        found = [await self._cached(first, model, prompt) or 0 for _ in range(HITS)]
        self._tally.salts["own prefix found" if any(found) else "own prefix not found"] += 1

    async def _cached(self, tenant: Tenant, model: str, prompt: str) -> int | None:
        ask = Ask("prefix", "completions", {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0})
        began = time.monotonic()
        result = await tenant.send("http", ask, model, stream=False)
        if result.answer is not None:
            return result.answer.cached_tokens
        if not verdict(result, "http", began, time.monotonic(), self._outages.struck):
            self._tally.fault(f"{result.ending} {result.code}".strip(), f"prefix: {result.status} {result.detail}")
        return None
