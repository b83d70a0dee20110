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
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import ClassVar

import anyio
import msgspec

from bench.common.machine import describe
from bench.common.stack import free_ports, running
from bench.common.table import markdown
from bench.drafting import timed_draft
from bench.drafting.counting import VERIFIED, Counts, draft_book, texts
from common.protocol.draft_messages import DraftClose, DraftResync, DraftUpdate, Proposals
from common.protocol.handles import WorkerRef
from common.protocol.messages import Message
from common.runtime import logs, nats_bus
from common.runtime.actor import Actor, Role
from common.runtime.service import SWITCH_INTERVAL_S
from services.decode.config import DecodeConfig

WARM_UP_S = 1.5
READY_S = 240.0
"""For a model on a GPU whose kernels are compiled first."""
LATE_S = 5e-4
"""A step of the target that begins later than this behind the one before begins a new schedule."""


class Times(msgspec.Struct, frozen=True):
    """Milliseconds. verified: of each token that a step verifies. lag: from the end of a target's step to its message."""

    target: float
    verified: float
    lag: float

    def step_s(self, num_tokens: int) -> float:
        """Return how long a step of the target takes."""
        return 1e-3 * (self.target + self.verified * num_tokens)


class Found(msgspec.Struct):
    """What the target's side prints: what it counted in so many seconds, and the median round trip."""

    counts: Counts
    seconds: float
    round_trip_ms: float


# ── the target ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Target(Actor):
    """A decode worker whose steps only take time."""

    role: ClassVar[Role] = "decode"
    hears = ("draft",)

    def __init__(self, bus: nats_bus.NatsBus, nats: str, times: Times, streams: int, seconds: float) -> None:
        super().__init__(bus=bus, config=DecodeConfig(nats_url=nats, model=timed_draft.MODEL, heartbeat_s=0.5))
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
    parser.add_argument("--target-ms", type=float, default=5.6)
    parser.add_argument("--verified-ms", type=float, default=0.02, help="of each token of the target's step")
    parser.add_argument("--lag-ms", type=float, default=1.0, help="whole milliseconds")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each number of streams")
    timed_draft.add_arguments(parser)
    parser.add_argument("--nats", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def times_of(options: argparse.Namespace) -> Times:
    return Times(target=options.target_ms, verified=options.verified_ms, lag=options.lag_ms)


async def measure(argv: Sequence[str], streams: int) -> Found:
    """:raises SystemExit: if the target found nothing."""
    (port,) = free_ports(1)
    nats = f"nats://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder)) as stack:
            stack.start_nats(port)
            stack.start("draft", "bench.drafting.timed_draft", f"--nats={nats}", *timed_draft.flags_of(parse(argv)))
            target = stack.start("target", "bench.drafting.emulated", *argv, f"--nats={nats}", f"--streams={streams}")
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
    if options.nats:  # this is the target's process
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        logs.configure("warning", "console")
        arguments = options.nats, times, int(options.streams), options.seconds
        anyio.run(target_side, *arguments, backend_options={"use_uvloop": True})
        return 0
    rows = [row_of(int(streams), anyio.run(measure, argv, int(streams)), times) for streams in options.streams.split(",")]
    print(f"{describe()}\n")
    print(markdown(["streams", "of off", "verify", "accepted", "target step, ms", "round trip, ms"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
