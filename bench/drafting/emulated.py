"""A draft worker's process and its messages, with an engine that only takes time: `python -m bench.drafting.emulated`.

    python -m bench.drafting.emulated --streams 1,4,8
    python -m bench.drafting.emulated --streams 8 --draft-ms 0.9 --submit-ms 0.3,0.01 --branches 0

Real: the draft worker with a model (`services/draft/model_actor.py`) in a process of its own, its event loop and threads, a
nats-server, and the decode worker's book of proposals (`services/decode/speculation.py`). Emulated: the draft worker's engine,
whose steps take --draft-ms one after the other, and the host --submit-ms for each step and for each row, with the interpreter
held; and a target whose steps take --target-ms and --verified-ms for each token, and which tells of a step --lag-ms after its
end. Texts count, as in `bench.drafting.simulated`. So it shows what the draft worker's host costs, without a GPU.

Columns: tokens per second over those without proposals; steps that verify something; tokens accepted of those, and by step that
verifies; a step of the target; from an update to the proposal that answers it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import anyio
import msgspec

from bench.common.machine import describe
from bench.common.stack import Stack, free_ports, running
from bench.common.table import markdown
from bench.drafting.simulated import BLOCK_TOKENS, PROMPT, VERIFIED, VOCAB, WRONG, choices
from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.cache.retention import KEEP_ALL
from common.engine.outcomes import accept
from common.engine.plan import RowSamples, StepPlan, StepResult
from common.protocol.draft_messages import DraftClose, DraftResync, DraftUpdate, Proposals
from common.protocol.handles import WorkerRef
from common.protocol.messages import Message, TokenLogprobs
from common.runtime import logs, nats_bus
from common.runtime.actor import Actor, Role
from common.runtime.nats_server import find_binary
from common.runtime.service import SWITCH_INTERVAL_S
from services.decode.config import DecodeConfig
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from services.decode.step_costs import SIZES, StepCosts
from services.draft.config import DraftConfig
from services.draft.model_actor import ModelDraftActor
from services.draft.model_engine import DraftEngine

MODEL = "dummy:llama-3.2-1b-counting"
"""Whose name both sides have; nothing of it is loaded."""
NUM_BLOCKS = 40_000
WARM_UP_S = 1.5
READY_S = 20.0


class Times(msgspec.Struct, frozen=True):
    """Milliseconds; `lag` is that of the target's word."""

    target: float
    verified: float
    draft: float
    submit: float
    submit_row: float
    lag: float
    percent: float

    def step_s(self, num_tokens: int) -> float:
        """Return how long a step of the target takes."""
        return 1e-3 * (self.target + self.verified * num_tokens)


class Found(msgspec.Struct):
    """What the target's side prints: counts, of all streams, in so many seconds."""

    seconds: float
    tokens: int = 0
    steps: int = 0
    verifying: int = 0
    verified: int = 0
    accepted: int = 0
    round_trip_ms: float = 0.0


# ── the draft worker's engine ────────────────────────────────────────────────────────────────────────────────────────────


class TimedStep:
    """A step on its way; see `plan.PendingStep`."""

    def __init__(self, plan: StepPlan, samples: Sequence[tuple[int, int]], ends_at: float) -> None:
        self._plan, self._samples, self._ends_at = plan, samples, ends_at

    def result(self) -> StepResult:
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))
        samples, rows = iter(self._samples), []
        for row in self._plan.rows:
            rows.append(_drawn(*next(samples), asked=row.sampling.logprobs >= 0) if row.num_samples else RowSamples([]))
        return StepResult(rows=rows, elapsed_s=0.0)


def _drawn(first: int, second: int, *, asked: bool) -> RowSamples:
    others = range(WRONG - 8, WRONG - 2)
    said = TokenLogprobs(-0.25, (first, second, *others), (-0.25, -1.7, *(-6.0 - rank for rank in range(6))))
    return RowSamples([first], logprobs=[said] if asked else None)


class TimedRunner:
    """`plan.Runner`, as far as a draft worker needs it."""

    run_ahead = 2
    max_context = vocab_size = VOCAB

    def __init__(self, times: Times) -> None:
        self._times = times
        self._free_at = 0.0
        self._samples: list[tuple[int, int]] = []

    def may_compile(self, plan: StepPlan) -> bool:
        return False

    def submit(self, plan: StepPlan) -> TimedStep:
        over_at = time.perf_counter() + 1e-3 * (self._times.submit + self._times.submit_row * len(plan.rows))
        samples: list[tuple[int, int]] = []
        for row in plan.rows:
            last = self._samples[row.feed][0] if row.feed >= 0 and len(row.tokens) == 1 else row.tokens[-1]
            if row.num_samples:
                samples.append(choices(last, self._times.percent))
        while time.perf_counter() < over_at:  # as Python that packs
            pass
        self._samples = samples
        self._free_at = max(self._free_at, time.perf_counter()) + 1e-3 * self._times.draft
        return TimedStep(plan, samples, self._free_at)


class TimedEngine:
    """`Engine`, as far as a draft worker needs it."""

    on_gpu = True

    def __init__(self, times: Times) -> None:
        self.runner = TimedRunner(times)

    def pool(self, fence: object, *, zero_retention: bool) -> GroupedPool:
        return GroupedPool(PoolGroup(BlockPool(NUM_BLOCKS, BLOCK_TOKENS), KEEP_ALL))

    def close(self) -> None: ...


async def draft_side(nats: str, times: Times, branches: int) -> None:
    engine: Any = TimedEngine(times)
    config = DraftConfig(nats_url=nats, model=MODEL, draft_model=MODEL, draft_branches=branches, heartbeat_s=0.5)
    bus = await nats_bus.connect(nats, name="draft")
    await ModelDraftActor(bus=bus, config=config, open_engine=lambda name, on_progress: DraftEngine(engine, "")).run()


# ── the target ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Target(Actor):
    """A decode worker whose steps only take time."""

    role: ClassVar[Role] = "decode"
    hears = ("draft",)

    def __init__(self, bus: nats_bus.NatsBus, nats: str, times: Times, streams: int, seconds: float) -> None:
        super().__init__(bus=bus, config=DecodeConfig(nats_url=nats, model=MODEL, heartbeat_s=0.5))
        costs = StepCosts(stale_after=1 << 60)
        for size in SIZES * 9:
            costs.observe(size, times.step_s(size))
        self._times, self._seconds = times, seconds
        self._book = DraftBook(SpeculationPolicy(max_tokens=VERIFIED, max_step_tokens=512, costs=costs), vocab_size=VOCAB)
        self._texts = {f"s{number}": [number * 10_007 + place for place in range(PROMPT)] for number in range(streams)}
        self._asked_at: dict[tuple[str, int], float] = {}
        self._trips_s: list[float] = []
        self._drafted = anyio.Event()
        self.found = Found(0.0)
        self.done = anyio.Event()

    def handle(self, message: Message, reply: str) -> None:
        if isinstance(message, Proposals):
            for row in message.rows:
                if (asked_at := self._asked_at.pop((row.sequence, row.base), None)) is not None:
                    self._trips_s.append(self.clock() - asked_at)
            self._book.on_proposals(message)
        elif isinstance(message, DraftResync):
            self._book.on_resync(message)

    def tick(self, now: float) -> None:
        workers = self.registry.alive("draft", now)
        self._book.set_workers(workers)
        if workers:
            self._drafted.set()

    async def work(self) -> None:
        with anyio.fail_after(READY_S):
            await self._drafted.wait()
        for name, text in self._texts.items():
            self._book.open(name, text)
        begun = ended = counted_from = self.clock()
        while self.clock() < begun + WARM_UP_S + self._seconds:
            if not self.found.seconds and self.clock() > begun + WARM_UP_S:
                counted_from, self.found = self.clock(), Found(1.0)
                self._trips_s.clear()
            self._book.begin_step(len(self._texts))
            verifying = {name: (self._book.lines(name) or [[]])[0][:VERIFIED] for name in self._texts}
            size = len(self._texts) + sum(map(len, verifying.values()))
            ended = max(ended, self.clock() - 5e-4) + self._times.step_s(size)
            await anyio.sleep(max(0.0, ended - self.clock()))
            self._end(verifying)
        self.found.seconds = self.clock() - counted_from
        self.found.round_trip_ms = 1e3 * median(self._trips_s) if self._trips_s else 0.0
        self.done.set()

    def _end(self, verifying: Mapping[str, Sequence[int]]) -> None:
        """A step has run."""
        found = self.found
        found.steps += 1
        for name, text in self._texts.items():
            verified = verifying[name]
            came = [(text[-1] + 1 + place) % VOCAB for place in range(len(verified) + 1)]
            accepted = accept(verified, came)
            text += came[: accepted + 1]
            found.tokens += accepted + 1
            found.verifying += bool(verified)
            found.verified += len(verified)
            found.accepted += accepted
            self._book.record(name, len(verified), accepted)
        messages = list(self._book.messages(self.ref))
        if self._times.lag:
            asyncio.get_running_loop().call_later(1e-3 * self._times.lag, self._tell, messages)
        else:
            self._tell(messages)

    def _tell(self, messages: Sequence[tuple[WorkerRef, DraftUpdate | DraftClose]]) -> None:
        for worker, message in messages:
            if isinstance(message, DraftUpdate):
                self._asked_at |= {(row.sequence, row.base + len(row.tokens)): self.clock() for row in message.rows}
            self.send(worker, message)


async def target_side(nats: str, times: Times, streams: int, seconds: float) -> None:
    """Print what was found."""
    bus = await nats_bus.connect(nats, name="decode")
    target = Target(bus, nats, times, streams, seconds)
    async with anyio.create_task_group() as group:
        await group.start(target.run)
        await target.done.wait()
        sys.stdout.write(msgspec.json.encode(target.found).decode() + "\n")
        group.cancel_scope.cancel()


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.drafting.emulated", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--percent", type=float, default=80, help="of tokens behind which the draft model is right")
    parser.add_argument("--target-ms", type=float, default=5.6)
    parser.add_argument("--verified-ms", type=float, default=0.02, help="of each token of the target's step")
    parser.add_argument("--draft-ms", type=float, default=0.85)
    parser.add_argument("--submit-ms", default="0.32,0.01", help="of the host, for a step and for each row of it")
    parser.add_argument("--lag-ms", type=float, default=1.0, help="whole milliseconds")
    parser.add_argument("--branches", type=int, default=-1, help="as --draft-branches")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each number of streams")
    parser.add_argument("--side", choices=["draft", "target"], help=argparse.SUPPRESS)
    parser.add_argument("--nats", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def times_of(options: argparse.Namespace) -> Times:
    submit, row = map(float, options.submit_ms.split(","))
    return Times(
        target=options.target_ms,
        verified=options.verified_ms,
        draft=options.draft_ms,
        submit=submit,
        submit_row=row,
        lag=options.lag_ms,
        percent=options.percent,
    )


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


async def measure(argv: Sequence[str], streams: int) -> Found:
    """:raises SystemExit: if the target found nothing."""
    (port,) = free_ports(1)
    nats = f"nats://127.0.0.1:{port}"
    with folder() as logs_folder:
        async with running(logs_folder) as stack:
            start_nats(stack, port)
            flags = [*argv, f"--nats={nats}", f"--streams={streams}"]
            stack.start("draft", "bench.drafting.emulated", *flags, "--side=draft")
            target = stack.start("target", "bench.drafting.emulated", *flags, "--side=target")
            await anyio.to_thread.run_sync(target.process.wait)
            said = target.log.read_text().splitlines()
            found = [line for line in said if line.startswith('{"seconds"')]
            if not found:
                raise SystemExit(f"the target ended with {target.process.returncode}: {said[-1:]}")
            return msgspec.json.decode(found[0], type=Found)


def start_nats(stack: Stack, port: int) -> None:
    stack.start("nats", "common.runtime.parent_death", "SIGKILL", str(find_binary()), "-a=127.0.0.1", f"-p={port}")


def row_of(streams: int, found: Found, times: Times) -> list[str]:
    """Return a row of the table."""
    plain = streams / times.step_s(streams)
    return [
        str(streams),
        f"{found.tokens / found.seconds / plain:.2f}",
        f"{found.verifying / found.steps / streams:.0%}",
        f"{found.accepted / max(1, found.verified):.0%}, {found.accepted / max(1, found.verifying):.2f}",
        f"{1e3 * found.seconds / found.steps:.2f}",
        f"{found.round_trip_ms:.2f}",
    ]


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    times = times_of(options)
    if options.side:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        logs.configure("warning", "console")
        streams = int(options.streams)
        if options.side == "draft":
            anyio.run(draft_side, options.nats, times, options.branches, backend_options={"use_uvloop": True})
        else:
            anyio.run(target_side, options.nats, times, streams, options.seconds, backend_options={"use_uvloop": True})
        return 0
    rows = [row_of(int(streams), anyio.run(measure, argv, int(streams)), times) for streams in options.streams.split(",")]
    print(f"{describe()}\n")
    print(markdown(["streams", "of off", "verify", "accepted", "target step, ms", "round trip, ms"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
