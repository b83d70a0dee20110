"""Real processes under load, so that a test can hurt them while clients stream, and see what the clients saw.

site = Site(stack, server, jobs, clients=6)
async with site.crowd() as crowd:       # six clients, each starts a new stream as its last one ends
    await crowd.streaming()
    site.stack.kill("decode-0")
    await anyio.sleep(3)
crowd.check()                           # every stream ended well, with the text of an undisturbed run
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx

from common.engine.simulated.runner import TokenRule, expected_tokens
from common.models.source import ModelFiles
from common.protocol.handles import Role
from common.protocol.messages import SamplingParams
from common.text.bundle import TextBundle, load_bundle
from common.transfer.segment_file import sweep
from tests.e2e.stack import ROOT, Reply, Stack
from tests.fixtures.nats import LocalNatsServer

log = logging.getLogger("chaos")

GAP_LIMIT_S = 5.0
"""The longest that a stream may be silent when something dies."""
WHOLE: dict[Role, int] = {"gateway": 1, "kvstore": 1, "draft": 1, "prefill": 2, "decode": 2}

REAL_ENGINE = ("--dtype", "float32", "--kv-cache-mb", "128")
SIMULATED_ENGINE = ("--engine", "simulated", "--profile", "b200-llama-70b", "--time-scale", "1", "--kv-cache-mb", "4")
FASTER_ENGINE = (*SIMULATED_ENGINE[:4], "--time-scale", "0.2", *SIMULATED_ENGINE[6:])
"""For tests that kill workers in the middle of answers, but measure no times."""


@dataclass(frozen=True)
class Job:
    """What a client asks for, and, once it is known, the text that it must get."""

    body: dict[str, Any]
    expected: Callable[[], str]


@dataclass
class Seen:
    """One stream as its client saw it."""

    job: Job
    reply: Reply
    began: float
    ended: float = 0.0

    @property
    def longest_gap_s(self) -> float:
        times = [self.began, *self.reply.times, *([self.ended] if self.ended else [])]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


@dataclass
class Crowd:
    """Clients in a closed loop."""

    stack: Stack
    gateway: str
    jobs: Iterator[Job]
    changes: dict[str, Any]
    seen: list[Seen] = field(default_factory=list)
    stopped: bool = False
    running: dict[int, Seen] = field(default_factory=dict)

    async def client(self, number: int) -> None:
        while not self.stopped:
            job = next(self.jobs)
            seen = Seen(job, Reply(), time.monotonic())
            self.seen.append(seen)
            self.running[number] = seen
            try:
                await self.stack.complete(reply=seen.reply, gateway=self.gateway, **(job.body | self.changes))
            except httpx.HTTPError as error:
                seen.reply.error = {"message": repr(error)}
            seen.ended = time.monotonic()

    async def streaming(self, *, chunks: int = 3, within_s: float = 60) -> None:
        """Every client has come into the middle of a stream."""
        await anyio.sleep(0.02)  # until all have begun
        waiting = set(self.running)
        with anyio.fail_after(within_s):
            while waiting:
                await anyio.sleep(0.02)
                waiting = {number for number in waiting if len(self.running[number].reply.times) < chunks}

    async def turnover(self, within_s: float = 60) -> None:
        """Each client has ended the stream that it has now."""
        had = list(self.running.values())
        with anyio.fail_after(within_s):
            while any(not seen.ended for seen in had):
                await anyio.sleep(0.02)

    def check(self) -> float:
        """No request failed, and each gave the right text. Returns the longest silence, in seconds, that a client saw."""
        for seen in self.seen:
            assert seen.reply.error is None, seen
            assert seen.reply.finish == "length", seen
            assert seen.reply.text == seen.job.expected(), seen
        longest_gap_s = max(seen.longest_gap_s for seen in self.seen)
        log.info("%d streams, the longest silence %.2f s", len(self.seen), longest_gap_s)
        return longest_gap_s


class Site:
    """`clients`: how many there are in a crowd."""

    def __init__(
        self, stack: Stack, server: LocalNatsServer, jobs: Iterator[Job], *, clients: int, gateway_flags: tuple[str, ...] = ()
    ) -> None:
        self.stack = stack
        self.server = server
        self.jobs = jobs
        self.clients = clients
        self.gateway_flags = gateway_flags

    @contextlib.asynccontextmanager
    async def crowd(self, clients: int = 0, **changes: Any) -> AsyncIterator[Crowd]:
        """Clients that stream while the block runs; afterwards each ends its last stream. `changes` of what they ask for."""
        crowd = Crowd(self.stack, self.gateway, self.jobs, changes)
        async with anyio.create_task_group() as group:
            for number in range(clients or self.clients):
                group.start_soon(crowd.client, number)
            try:
                yield crowd
            finally:
                crowd.stopped = True

    async def clean(self, within_s: float = 3.0) -> None:
        """Nothing is held and no block is missing, on any worker, within this time."""
        log.info("clean after %.2f s", await self.stack.clean(within_s))

    async def make_whole(self) -> None:
        """All workers of `WHOLE` run, are ready and hold nothing; of those before them nothing is left."""
        for role, count in WHOLE.items():
            for _ in range(count - len(self.alive(role))):
                await self.stack.start(role, *(self.gateway_flags if role == "gateway" else ()))
        await self.stack.ready(within_s=120)
        await self.stack.clean(within_s=10)
        assert not sweep(str(self.stack.shm_dir)), "who starts removes what the killed left"

    def alive(self, role: str) -> list[str]:
        return [name for name, process in self.stack.processes.items() if name.startswith(role) and process.poll() is None]

    @property
    def gateway(self) -> str:
        return self.alive("gateway")[0]

    async def resumes(self) -> float:
        """Streams that the gateway took to another worker so far."""
        page = (await self.stack.client.get(f"{self.stack.url(self.gateway)}/metrics")).text
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("penstock_request_resumes_total"))

    async def until(self, condition: Callable[[], bool], within_s: float) -> float:
        """Seconds until it was true."""
        began = time.monotonic()
        with anyio.fail_after(within_s):
            while not condition():
                await anyio.sleep(0.01)
        return time.monotonic() - began

    async def busy(self, role: str, within_s: float = 30) -> str:
        """A worker of this role that has something in work now."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [name for name in self.alive(role) if (p := self.stack.presence(name)).running + p.waiting > 0]
            return bool(found)

        await self.until(look, within_s)
        return found[0]


# -- what clients ask for


def simulated_jobs(files: ModelFiles, seed: int = 0, *, tokens: range = range(30, 80)) -> Iterator[Job]:
    """For ever new prompts; what they must give is known without any worker. `tokens`: how many are asked for."""
    dice = random.Random(seed)
    bundle = load_bundle(files)
    rule = TokenRule(len(bundle.tokenizer.byte_table(skip_special=True)))
    while True:
        prompt = [dice.randrange(3, 40_000) for _ in range(dice.choice([1, 5, 40, 70, 200, 500, 900]))]
        sampling = SamplingParams(
            temperature=dice.choice([0.0, 1.0]), seed=dice.randrange(1 << 30), max_tokens=dice.choice(tokens)
        )
        body = {
            "prompt": prompt,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "max_tokens": sampling.max_tokens,
            "ignore_eos": True,
        }
        yield Job(body, functools.partial(_simulated_text, bundle, rule, prompt, sampling))


def _simulated_text(bundle: TextBundle, rule: TokenRule, prompt: list[int], sampling: SamplingParams) -> str:
    detokenizer = bundle.detokenizer(continues=True)
    return detokenizer.push(expected_tokens(prompt, sampling, sampling.max_tokens, rule=rule)) + detokenizer.finish()


async def real_jobs(server: LocalNatsServer, directory: Path, *, count: int, max_tokens: int) -> list[Job]:
    """Continuations of English prose, greedy and seeded, and what an undisturbed decode worker makes of them."""
    words = (ROOT / "LICENSE").read_text().split()
    bodies = [
        {
            "prompt": " ".join(words[40 * number : 40 * number + 25 + 15 * (number % 4)]),
            "temperature": 0.9 * (number % 2),
            "seed": number,
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        for number in range(count)
    ]
    texts: dict[int, str] = {}

    async def run(number: int) -> None:
        reply = await stack.complete(**bodies[number])
        assert reply.finish == "length", reply
        texts[number] = reply.text

    directory.mkdir()
    async with Stack(server.url, directory, engine_flags=REAL_ENGINE) as stack:
        for role in ("gateway", "decode", "decode"):
            await stack.start(role)
        await stack.ready(within_s=120)
        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(run, number)
    return [Job(body, functools.partial(texts.__getitem__, number)) for number, body in enumerate(bodies)]
