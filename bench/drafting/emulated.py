"""A draft worker's process and its messages, with an engine that only takes time: `python -m bench.drafting.emulated`.

    python -m bench.drafting.emulated --streams 1,4,8
    python -m bench.drafting.emulated --streams 8 --draft-ms 0.9 --submit-ms 0.3,0.01 --branches 0
    python -m bench.drafting.emulated --draft dummy:llama-3.2-1b-counting-80         with a draft model, on one GPU

Real: the draft worker with a model (`services/draft/model_actor.py`) in a process of its own, its event loop and threads, a
nats-server, and the decode worker's book of proposals (`services/decode/speculation.py`). Emulated: a target whose steps take
--target-ms and --verified-ms for each token, and which tells of a step --lag-ms after its end; and, unless --draft names a
model, the draft worker's engine, whose steps take --draft-ms one after the other, and the host --submit-ms for each step and
for each row, with the interpreter held. Texts count, as in `bench.drafting.simulated`. So it shows what the draft worker's host
costs, without a GPU.

Columns: tokens per second over those without proposals; steps that verify something; tokens accepted of those, and by step that
verifies; a step of the target; from an update to the proposal that answers it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import anyio
import msgspec

from bench.common.machine import describe
from bench.common.stack import free_ports, running
from bench.common.table import markdown
from bench.drafting.counting import BLOCK_TOKENS, VERIFIED, VOCAB, Counts, choices, draft_book, samples, texts
from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.cache.retention import KEEP_ALL
from common.engine.plan import RowSamples, StepPlan, StepResult
from common.protocol.draft_messages import DraftClose, DraftResync, DraftUpdate, Proposals
from common.protocol.handles import WorkerRef
from common.protocol.messages import Message
from common.runtime import logs, nats_bus
from common.runtime.actor import Actor, Role
from common.runtime.service import SWITCH_INTERVAL_S
from services.decode.config import DecodeConfig
from services.draft.config import DraftConfig
from services.draft.model_actor import ModelDraftActor
from services.draft.model_engine import DraftEngine, open_draft_engine

MODEL = "dummy:llama-3.2-1b-counting"
"""Whose name both sides have; nothing of it is loaded."""
NUM_BLOCKS = 40_000
WARM_UP_S = 1.5
READY_S = 240.0
"""For a model on a GPU whose kernels are compiled first."""
LATE_S = 5e-4
"""A step of the target that begins later than this behind the one before begins a new schedule."""


class Times(msgspec.Struct, frozen=True):
    """Milliseconds. lag: from the end of a target's step to its message.

    percent: of all tokens, those behind which the draft model is right.
    """

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
    """What the target's side prints: what it counted in so many seconds, and the median round trip."""

    counts: Counts
    seconds: float
    round_trip_ms: float


# ── the draft worker's engine ────────────────────────────────────────────────────────────────────────────────────────────


class TimedStep:
    """A step on its way; see `plan.PendingStep`."""

    def __init__(self, rows: list[RowSamples], ends_at: float) -> None:
        self._rows, self._ends_at = rows, ends_at

    def result(self) -> StepResult:
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))
        return StepResult(rows=self._rows, elapsed_s=0.0)


class TimedRunner:
    """`plan.Runner`, as far as a draft worker needs it."""

    run_ahead = 2
    max_context = vocab_size = VOCAB

    def __init__(self, times: Times) -> None:
        self._times = times
        self._free_at = 0.0
        self._samples: list[int] = []

    def may_compile(self, plan: StepPlan) -> bool:
        return False

    def submit(self, plan: StepPlan) -> TimedStep:
        over_at = time.perf_counter() + 1e-3 * (self._times.submit + self._times.submit_row * len(plan.rows))
        rows: list[RowSamples] = []
        for row in plan.rows:
            last = self._samples[row.feed] if row.feed >= 0 and len(row.tokens) == 1 else row.tokens[-1]
            drawn = choices(last, self._times.percent)
            rows.append(samples(*drawn, with_logprobs=row.sampling.logprobs >= 0) if row.num_samples else RowSamples([]))
        self._samples = [token for row in rows for token in row.tokens]
        while time.perf_counter() < over_at:  # the interpreter is held, as while a step is packed
            pass
        self._free_at = max(self._free_at, time.perf_counter()) + 1e-3 * self._times.draft
        return TimedStep(rows, self._free_at)


class TimedEngine:
    """`Engine`, as far as a draft worker needs it."""

    on_gpu = True

    def __init__(self, times: Times) -> None:
        self.runner = TimedRunner(times)

    def pool(self, fence: object, *, zero_retention: bool) -> GroupedPool:
        return GroupedPool(PoolGroup(BlockPool(NUM_BLOCKS, BLOCK_TOKENS), KEEP_ALL))

    def close(self) -> None: ...


async def draft_side(options: argparse.Namespace) -> None:
    spec = options.draft or MODEL
    config = DraftConfig(nats_url=options.nats, model=spec, draft_model=spec, draft_branches=options.branches, heartbeat_s=0.5)

    def open_engine(name: str, on_progress: Callable[[int, int], None]) -> DraftEngine:
        if options.draft:
            return open_draft_engine(config, name, on_progress)
        timed: Any = TimedEngine(times_of(options))
        return DraftEngine(timed, "")

    bus = await nats_bus.connect(options.nats, name="draft")
    actor = ModelDraftActor(bus=bus, config=config, open_engine=open_engine)
    actor.polls = actor.polls and not options.no_polling
    await actor.run()


# ── the target ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Target(Actor):
    """A decode worker whose steps only take time."""

    role: ClassVar[Role] = "decode"
    hears = ("draft",)

    def __init__(self, bus: nats_bus.NatsBus, nats: str, times: Times, streams: int, seconds: float) -> None:
        super().__init__(bus=bus, config=DecodeConfig(nats_url=nats, model=MODEL, heartbeat_s=0.5))
        self._times, self._seconds = times, seconds
        self._book = draft_book(times.step_s)
        self._texts = texts(streams)
        self._counts = Counts()
        self._ends_at = 0.0
        self._asked_at: dict[tuple[str, int], float] = {}
        self._trips_s: list[float] = []
        self._drafted = anyio.Event()
        self.found: asyncio.Future[Found] = asyncio.get_running_loop().create_future()

    def handle(self, message: Message, reply: str) -> None:
        if isinstance(message, Proposals):
            for row in message.rows:
                if (asked_at := self._asked_at.pop((row.sequence, row.base), None)) is not None:
                    self._trips_s.append(self.clock() - asked_at)
            self._book.on_proposals(message)
        elif isinstance(message, DraftResync):
            self._book.on_resync(message)

    def tick(self, now: float) -> None:
        workers = [worker for worker in self.registry.alive("draft", now) if worker.state == "ready"]
        self._book.set_workers(workers)
        if workers:
            self._drafted.set()

    async def work(self) -> None:
        with anyio.fail_after(READY_S):
            await self._drafted.wait()
        for name, text in self._texts.items():
            self._book.open(name, text)
        await self._step_for(WARM_UP_S)
        self._counts = Counts()
        self._trips_s.clear()
        seconds = await self._step_for(self._seconds)
        self.found.set_result(Found(self._counts, seconds, 1e3 * median(self._trips_s) if self._trips_s else 0.0))

    async def _step_for(self, seconds: float) -> float:
        """Return how many seconds the steps took."""
        begun = self.clock()
        while self.clock() < begun + seconds:
            self._book.begin_step(len(self._texts))
            verifying = {name: (self._book.lines(name) or [[]])[0][:VERIFIED] for name in self._texts}
            size = len(self._texts) + sum(map(len, verifying.values()))
            self._ends_at = max(self._ends_at, self.clock() - LATE_S) + self._times.step_s(size)
            await anyio.sleep(max(0.0, self._ends_at - self.clock()))
            self._counts.end_step(self._book, self._texts, verifying)
            messages = self._book.messages(self.ref)
            asyncio.get_running_loop().call_later(1e-3 * self._times.lag, self._tell, messages)
        return self.clock() - begun

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
        sys.stdout.write(msgspec.json.encode(await target.found).decode() + "\n")
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
    parser.add_argument("--draft", default="", help="a dummy model that counts, on a GPU, instead of an engine that takes time")
    parser.add_argument("--no-polling", action="store_true", help="the draft worker waits for its steps in a thread")
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


async def measure(argv: Sequence[str], streams: int) -> Found:
    """:raises SystemExit: if the target found nothing."""
    (port,) = free_ports(1)
    nats = f"nats://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder)) as stack:
            stack.start_nats(port)
            flags = [*argv, f"--nats={nats}", f"--streams={streams}"]
            stack.start("draft", "bench.drafting.emulated", *flags, "--side=draft")
            target = stack.start("target", "bench.drafting.emulated", *flags, "--side=target")
            await anyio.to_thread.run_sync(target.process.wait)
            said = target.log.read_text().splitlines()
            found = [line for line in said if line.startswith('{"counts"')]
            if not found:
                raise SystemExit(f"the target ended with {target.process.returncode}: {said[-1:]}")
            return msgspec.json.decode(found[0], type=Found)


def row_of(streams: int, found: Found, times: Times) -> list[str]:
    """Return a row of the table."""
    return [
        str(streams),
        *found.counts.cells(streams, found.seconds, times.step_s(streams)),
        f"{1e3 * found.seconds / found.counts.steps:.2f}",
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
            anyio.run(draft_side, options, backend_options={"use_uvloop": True})
        else:
            anyio.run(target_side, options.nats, times, streams, options.seconds, backend_options={"use_uvloop": True})
        return 0
    rows = [row_of(int(streams), anyio.run(measure, argv, int(streams)), times) for streams in options.streams.split(",")]
    print(f"{describe()}\n")
    print(markdown(["streams", "of off", "verify", "accepted", "target step, ms", "round trip, ms"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
