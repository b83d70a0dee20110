"""How well a gateway routes that follows one that was killed: real processes on a nats-server, simulated engines."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import httpx
import msgspec

from bench.common.stack import Child, Stack, free_ports, quiet_flags, running
from common.protocol.errors import ConfigError

MODEL = "smollm2-135m-instruct"
KILLED_FOR_S = 5.0
"""Figures are taken so long after the new gateway was started."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of prompts' tokens that were cached: as each prefix is asked for again at the old gateway, and at the new one.

    `ready_s`: from its start until it is ready. `known_s`: until it knows every worker's cache. `asked_s`: until the requests
    began.
    """

    before: float
    after: float
    ready_s: float
    known_s: float
    asked_s: float
    num_blocks: int


class System:
    def __init__(self, stack: Stack, *, num_prefill: int, kv_index_blocks: int) -> None:
        self._stack = stack
        self._num_prefill = num_prefill
        self._index = kv_index_blocks
        self._nats, *self._ports = free_ports(3)
        self._port = 0
        self._gateway: Child | None = None

    async def start(self) -> None:
        self._stack.start_nats(self._nats)
        engine = ("--engine=simulated", "--profile=h200-llama-8b")
        for number in range(self._num_prefill):
            self._stack.start(f"prefill-{number}", "services.prefill", *self._flags(f"prefill-{number}"), *engine)
        self._stack.start("decode", "services.decode", *self._flags("decode-0"), *engine)
        self.start_gateway()
        await self._stack.wait_ready(self._port)
        await self.known(self._num_prefill + 1)

    def start_gateway(self) -> None:
        self._port = self._ports.pop()
        flags = (*self._flags(f"gateway-{self._port}", self._port), "--direct-max-tokens=-1", "--canary-interval-s=600")
        self._gateway = self._stack.start(
            f"gateway-{self._port}", "services.gateway", *flags, f"--kv-index-blocks={self._index}"
        )

    async def replace_gateway(self) -> tuple[float, float, float]:
        """kill -9, and start another one. Returns seconds from its start to ready, to known, and to now."""
        assert self._gateway is not None
        self._gateway.process.kill()
        self._gateway.process.wait()
        self._stack.children.remove(self._gateway)
        began = time.monotonic()
        self.start_gateway()
        await self._stack.wait_ready(self._port)
        ready_s = time.monotonic() - began
        known_s = await self.known(self._num_prefill + 1) + ready_s if self._index else 0.0
        await anyio.sleep(max(0.0, began + KILLED_FOR_S - time.monotonic()))
        return ready_s, known_s, time.monotonic() - began

    async def known(self, workers: int) -> float:
        """Wait until the gateway knows so many workers' caches; return how many seconds that took."""
        began = time.monotonic()
        while self._index and await self.metric("kv_index_workers") < workers:
            if time.monotonic() - began > 30:
                raise ConfigError("the gateway does not learn what workers hold")
            await anyio.sleep(0.02)
        return time.monotonic() - began

    async def metric(self, name: str) -> float:
        async with httpx.AsyncClient() as http:
            page = (await http.get(f"http://127.0.0.1:{self._port}/metrics")).text
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"penstock_{name}{{"))

    async def cached_share(self, prefixes: Sequence[list[int]], tail_tokens: int, dice: random.Random) -> float:
        """Ask for each prefix once, in any order, with an ending of its own; return the share of the tokens that was cached."""
        cached = asked = 0
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", timeout=60) as http:
            for prefix in dice.sample(prefixes, len(prefixes)):
                prompt = [*prefix, *(dice.randrange(1000, 30_000) for _ in range(tail_tokens))]
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0}
                answer = msgspec.json.decode((await http.post("/v1/completions", json=body)).content)
                if "error" in answer:
                    raise ConfigError(f"the request failed: {answer['error']}")
                cached += (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                asked += len(prompt)
        return cached / asked

    def _flags(self, worker_id: str, port: int = 0) -> Sequence[str]:
        return quiet_flags(worker_id, f"nats://127.0.0.1:{self._nats}", MODEL, port)


async def measure(
    folder: Path, *, num_prefill: int, num_prefixes: int, prefix_tokens: int, tail_tokens: int, kv_index_blocks: int
) -> Recovery:
    """Kill a gateway that knows all prefixes, and look how well the next one does."""
    dice = random.Random(5)
    prefixes = [[dice.randrange(1000, 30_000) for _ in range(prefix_tokens)] for _ in range(num_prefixes)]
    async with running(folder) as stack:
        system = System(stack, num_prefill=num_prefill, kv_index_blocks=kv_index_blocks)
        await system.start()
        await system.cached_share(prefixes, tail_tokens, dice)
        before = await system.cached_share(prefixes, tail_tokens, dice)
        ready_s, known_s, asked_s = await system.replace_gateway()
        num_blocks = int(await system.metric("kv_index_blocks"))
        after = await system.cached_share(prefixes, tail_tokens, dice)
    return Recovery(before=before, after=after, ready_s=ready_s, known_s=known_s, asked_s=asked_s, num_blocks=num_blocks)
