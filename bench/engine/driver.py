"""Drives a runner through whole requests in this process, token ids in and out: what a decode worker does, without a bus.

    waiting ─► prefilling, in chunks of the token budget ─► decoding, one token a step ─► done

The lengths of all outputs are given, so a step can be planned before the one before it is read: with a runner that runs ahead,
step n + 1 is on its way while step n runs, and a row whose input is a sample of step n says so (`StepRow.feed`). Others execute
step by step. Greedy; no stop ids; no prefix is shared. Blocks are handed out in random order, as those of a pool that has been
in use are: of a cache group that keeps everything when a request begins, of others step by step.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.cache.block_table import BlockTable
from common.cache.grouped_pool import HOLE
from common.cache.retention import KEEP_ALL, Retention
from common.engine.plan import UNKNOWN, Constraint, PendingStep, Runner, StepPlan, StepResult, StepRow, part_of
from common.protocol.errors import ConfigError
from common.protocol.messages import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True, eq=False)
class Request:
    """One request. `planned`: input tokens whose step is planned; `sample`: its sample's index in the last planned step."""

    prompt: list[int]
    num_tokens: int
    sampling: SamplingParams = GREEDY
    output: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)
    planned: int = 0
    sample: int = -1
    constraint: Constraint | None = None

    @property
    def num_inputs(self) -> int:
        """The last output is no input."""
        return len(self.prompt) + self.num_tokens - 1


@dataclass(slots=True)
class Step:
    """A step's rows that decoded, tokens that it prefilled and tokens that came out, and when its result was read
    (`perf_counter`). `waiting`: requests that had no place then."""

    decoded: int
    prefilled: int
    sampled: int
    waiting: int
    read_at: float


@dataclass(slots=True)
class Run:
    """`begun_at`, `ended_at`: `perf_counter` seconds around everything, planning included."""

    begun_at: float
    ended_at: float = 0.0
    steps: list[Step] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.ended_at - self.begun_at

    def decode_gaps_s(self) -> list[float]:
        """Seconds between the results of steps that only decoded, without the first after another kind."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [b.read_at - a.read_at for a, b in pairs if not a.prefilled and not b.prefilled and a.decoded == b.decoded]

    def steady(self, after_s: float = 0.0) -> tuple[float, float]:
        """(tokens per second, seconds) from when the first request after the first ones got a place, and `after_s` of the run
        are over, until none waited. Requests that began together also prefill together: at first there is only decoding."""
        waiting = self.steps[0].waiting if self.steps else 0
        inside = [step for step in self.steps if 0 < step.waiting < waiting and step.read_at >= self.begun_at + after_s]
        if len(inside) < 2:
            return 0.0, 0.0
        seconds = inside[-1].read_at - inside[0].read_at
        return sum(step.sampled for step in inside[1:]) / seconds, seconds


class _FreeBlocks:
    """The blocks of a cache group that no request holds."""

    def __init__(self, retention: Retention, num_blocks: int, block_tokens: int, seed: int) -> None:
        self.retention = retention
        self.num_blocks, self._block_tokens = num_blocks, block_tokens
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)

    def needed(self, num_tokens: int) -> int:
        return self.retention.blocks_for(num_tokens, self._block_tokens)

    def has(self, num_tokens: int) -> bool:
        return len(self.free) >= self.needed(num_tokens)

    def cover(self, table: list[int], num_tokens: int) -> None:
        """Give `table` blocks for that many tokens. :raises ConfigError: if there are too few."""
        missing = max(0, -(-num_tokens // self._block_tokens) - len(table))
        if missing > len(self.free):
            raise ConfigError(
                f"a step needs {missing} blocks of a cache group ({self.retention.name}) that has {len(self.free)}"
            )
        table += [self.free.pop() for _ in range(missing)]

    def let_go(self, table: BlockTable, num_tokens: int | None = None) -> None:
        """Take back what no token from index `num_tokens` on reads; None: all."""
        end = len(table)
        if num_tokens is not None:
            end = min(end, self.retention.first_token(num_tokens) // self._block_tokens)
        begin = end
        while begin and table[begin - 1] != HOLE:
            begin -= 1
        self.free += table[begin:end]
        table.let_go(begin, end)


class Driver:
    """`max_rows`: requests in work at once. `token_budget`: of a step's prompts, beside a token of each decoding row."""

    def __init__(self, runner: Runner, *, token_budget: int, max_rows: int, seed: int = 0) -> None:
        self.runner = runner
        self.token_budget = token_budget
        self.max_rows = max_rows
        self.ahead = runner.run_ahead > 1
        groups = getattr(runner, "groups", None)
        pools = [(group.retention, len(group.pool)) for group in groups] if groups else [(KEEP_ALL, runner.num_blocks)]
        self.groups = [_FreeBlocks(retention, count, runner.block_tokens, seed) for retention, count in pools]
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._ended: list[Request] = []
        self._step = 0

    def generate(self, requests: Sequence[Request]) -> Run:
        """Run them all to their ends; outputs are in the requests.

        :raises ConfigError: if one of them can't be run by itself.
        """
        for request in requests:
            too_long = any(group.needed(request.num_inputs) > group.num_blocks for group in self.groups)
            if too_long or request.num_inputs >= self.runner.max_context:
                longest = min(group.retention.longest(group.num_blocks, self.runner.block_tokens) for group in self.groups)
                raise ConfigError(
                    f"{request.num_inputs} tokens of context don't fit: the runner holds {longest}, a sequence "
                    f"{self.runner.max_context}"
                )
        self._waiting.extend(requests)
        run = Run(time.perf_counter())
        if self.ahead:
            self._run_ahead(run)
        else:
            while (planned := self._plan()) is not None:
                self._commit(*planned, self.runner.execute(planned[0]), run)
        run.ended_at = time.perf_counter()
        return run

    def _run_ahead(self, run: Run) -> None:
        before: tuple[StepPlan, list[Request], PendingStep] | None = None
        while True:
            planned = self._plan()
            submitted = (*planned, self.runner.submit(planned[0])) if planned else None
            if before is not None:
                self._commit(before[0], before[1], before[2].result(), run)
            if submitted is None:
                return
            before = submitted

    # -- one step

    def _plan(self) -> tuple[StepPlan, list[Request]] | None:
        rows: list[StepRow] = []
        planned: list[Request] = []
        samples = 0
        self._let_go()  # the step before is submitted: its tables are packed
        decoding = [request for request in self._running if request.planned >= len(request.prompt)]
        for request in decoding:
            rows.append(self._decode_row(request))
            planned.append(request)
            request.sample = samples
            samples += 1
        budget = self.token_budget
        self._admit()
        for request in self._running:
            left = len(request.prompt) - request.planned
            if budget <= 0 or left <= 0:
                continue
            count = part_of(request.planned, left, budget)
            rows.append(self._row(request, request.prompt[request.planned : request.planned + count], int(count == left)))
            planned.append(request)
            if count == left:
                request.sample = samples
                samples += 1
            budget -= count
        if not rows:
            return None
        for request in planned:
            if request.planned >= request.num_inputs:  # steps run in order: who gets the blocks comes later
                self._running.remove(request)
                self._ended.append(request)
        self._step += 1
        return StepPlan(step=self._step, rows=rows), planned

    def _decode_row(self, request: Request) -> StepRow:
        index = request.planned - len(request.prompt)
        if index < len(request.output):
            return self._row(request, [request.output[index]], 1)
        row = self._row(request, [UNKNOWN], 1)
        row.feed = request.sample
        if request.constraint is not None:
            row.output.append(UNKNOWN)
        return row

    def _row(self, request: Request, tokens: list[int], num_samples: int) -> StepRow:
        for group, table in zip(self.groups, request.tables, strict=True):
            group.cover(table, request.planned + len(tokens))
        blocks, *more_blocks = request.tables
        row = StepRow(
            tokens=tokens,
            start=request.planned,
            blocks=blocks,
            more_blocks=more_blocks,
            num_samples=num_samples,
            sampling=request.sampling,
            prompt_tokens=len(request.prompt),
            constraint=request.constraint,
            output=[] if request.constraint is None else list(request.output),
        )
        request.planned += len(tokens)
        return row

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_rows:
            if not all(group.has(self._waiting[0].num_inputs) for group in self.groups):
                return
            request = self._waiting.popleft()
            request.tables = [BlockTable() for _ in self.groups]
            for group, table in zip(self.groups, request.tables, strict=True):
                if group.retention.keeps_all:
                    group.cover(table, request.num_inputs)
            self._running.append(request)

    def _let_go(self) -> None:
        for request in (*self._running, *self._ended):
            for group, table in zip(self.groups, request.tables, strict=True):
                group.let_go(table, request.planned if request not in self._ended else None)
        self._ended.clear()

    def _commit(self, plan: StepPlan, planned: list[Request], result: StepResult, run: Run) -> None:
        read_at = time.perf_counter()
        prefilled = sampled = 0
        for request, row, samples in zip(planned, plan.rows, result.rows, strict=True):
            if row.start < len(request.prompt):
                prefilled += len(row.tokens)
            sampled += len(samples.tokens)
            request.output += samples.tokens
            if samples.logprobs:
                request.logprobs += samples.logprobs
        run.steps.append(Step(plan.num_tokens - prefilled, prefilled, sampled, len(self._waiting), read_at))
