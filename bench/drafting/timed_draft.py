"""A draft worker whose engine only takes time, and drafts behind texts that count: `python -m bench.drafting.timed_draft`.

`bench.drafting.emulated` and the way "timed" of `bench.drafting` start it. Real are its process, event loop, threads and
messages (`services/draft/model_actor.py`). Steps take --draft-ms one after the other, and the host takes --submit-ms for each
step and for each row, with the interpreter held. With --draft it has the engine of a dummy model that counts instead.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec

from bench.drafting.counting import BLOCK_TOKENS, VOCAB, choices, samples
from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.cache.retention import KEEP_ALL
from common.engine.plan import RowSamples, StepPlan, StepResult
from common.models.config import load_config
from common.models.source import resolve
from common.runtime import logs, nats_bus
from common.runtime.service import SWITCH_INTERVAL_S
from common.text.vocabulary import vocabulary_digest
from services.draft.config import DraftConfig
from services.draft.model_actor import ModelDraftActor
from services.draft.model_engine import DraftEngine, open_draft_engine

NUM_BLOCKS = 40_000
FEW_ROWS = 8
MODEL = "dummy:llama-3.2-1b-counting"
"""Whose name both sides of the emulation have; nothing of it is loaded."""


class Pace(msgspec.Struct, frozen=True):
    """Milliseconds. draft: of a step of up to FEW_ROWS rows, and of a larger one. submit, submit_row: of the host, for a step
    and for each of its rows. percent: of all tokens, those behind which the draft model is right. vocab: ids that there are."""

    draft: tuple[float, float]
    submit: float
    submit_row: float
    percent: float
    vocab: int = VOCAB


class TimedStep:
    """A step on its way; see `plan.PendingStep`."""

    def __init__(self, rows: list[RowSamples], ends_at: float) -> None:
        self._rows, self._ends_at = rows, ends_at

    def has_run(self) -> bool:
        return time.perf_counter() >= self._ends_at

    def result(self) -> StepResult:
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))
        return StepResult(rows=self._rows, elapsed_s=0.0)


class TimedRunner:
    """`plan.Runner`, as far as a draft worker needs it."""

    run_ahead = 2

    def __init__(self, pace: Pace) -> None:
        self.max_context = self.vocab_size = pace.vocab
        self._pace = pace
        self._free_at = 0.0
        self._samples: list[int] = []

    def may_compile(self, plan: StepPlan) -> bool:
        return False

    def submit(self, plan: StepPlan) -> TimedStep:
        pace, vocab = self._pace, self.vocab_size
        over_at = time.perf_counter() + 1e-3 * (pace.submit + pace.submit_row * len(plan.rows))
        rows: list[RowSamples] = []
        for row in plan.rows:
            last = self._samples[row.feed] if row.feed >= 0 and len(row.tokens) == 1 else row.tokens[-1]
            drawn = choices(last, pace.percent, vocab)
            asks = row.sampling.logprobs >= 0
            rows.append(samples(*drawn, with_logprobs=asks, vocab=vocab) if row.num_samples else RowSamples([]))
        self._samples = [token for row in rows for token in row.tokens]
        while time.perf_counter() < over_at:  # the interpreter is held, as while a step is packed
            pass
        took_ms = pace.draft[len(plan.rows) > FEW_ROWS]
        self._free_at = max(self._free_at, time.perf_counter()) + 1e-3 * took_ms
        return TimedStep(rows, self._free_at)


class TimedEngine:
    """`Engine`, as far as a draft worker needs it."""

    on_gpu = True

    def __init__(self, pace: Pace) -> None:
        self.runner = TimedRunner(pace)

    def pool(self, fence: object, *, zero_retention: bool) -> GroupedPool:
        return GroupedPool(PoolGroup(BlockPool(NUM_BLOCKS, BLOCK_TOKENS), KEEP_ALL))

    def close(self) -> None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a timed draft worker can be given, whoever starts it."""
    parser.add_argument("--percent", type=float, default=80, help="of tokens behind which the draft model is right")
    parser.add_argument("--draft-ms", default="0.85", help=f"of a step; FEW,MANY: with up to {FEW_ROWS} rows, and with more")
    parser.add_argument("--submit-ms", default="0.32,0.01", help="of the host, for a step and for each row of it")
    parser.add_argument("--branches", type=int, default=-1, help="as --draft-branches")
    parser.add_argument("--draft", default="", help="a dummy model that counts, on a GPU, instead of an engine that takes time")
    parser.add_argument("--no-polling", action="store_true", help="the draft worker waits for its steps in a thread")


def flags_of(options: argparse.Namespace) -> list[str]:
    """What `add_arguments` has parsed, to start a draft worker with."""
    flags = [f"--percent={options.percent}", f"--draft-ms={options.draft_ms}", f"--submit-ms={options.submit_ms}"]
    flags += [f"--branches={options.branches}", f"--draft={options.draft}"]
    return [*flags, "--no-polling"] if options.no_polling else flags


def pace_of(options: argparse.Namespace, vocab: int) -> Pace:
    submit, row = map(float, options.submit_ms.split(","))
    few, _, many = options.draft_ms.partition(",")
    return Pace((float(few), float(many or few)), submit, row, options.percent, vocab)


def opening(options: argparse.Namespace, config: DraftConfig) -> Callable[[str, Callable[[int, int], None]], DraftEngine]:
    """Return what opens the engine. With --target the draft worker says that it has the target's vocabulary."""
    if options.draft:
        return lambda name, on_progress: open_draft_engine(config, name, on_progress)
    vocab, digest = VOCAB, ""
    if options.target:
        files = resolve(options.target, weights=False)
        vocab = load_config(files).vocab_size
        digest = vocabulary_digest(files, vocab)
    timed: Any = TimedEngine(pace_of(options, vocab))
    return lambda name, on_progress: DraftEngine(timed, digest)


async def draft(options: argparse.Namespace) -> None:
    drafts, target = options.draft or options.target or MODEL, options.target or options.draft or MODEL
    config = DraftConfig(
        nats_url=options.nats, model=target, draft_model=drafts, draft_branches=options.branches, heartbeat_s=0.5
    )
    bus = await nats_bus.connect(options.nats, name="draft")
    actor = ModelDraftActor(bus=bus, config=config, open_engine=opening(options, config))
    actor.polls = actor.polls and not options.no_polling
    await actor.run()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.drafting.timed_draft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nats", required=True, help="the bus")
    parser.add_argument("--target", default="", help="a dummy model that counts, whose decode workers this one drafts for")
    add_arguments(parser)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logs.configure("warning", "console")
    anyio.run(draft, parser.parse_args(argv), backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main(sys.argv[1:])
