"""Drives a runner through whole sequences, as a scheduler would: blocks, chunks, decode steps, ragged starts and ends.

Of a cache group with a window or chunks, a sequence holds the blocks that its next step reads or writes, and no others.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from common.cache.block_table import BlockTable
from common.cache.grouped_pool import HOLE
from common.cache.retention import KEEP_ALL, Retention
from common.engine.history import History
from common.engine.load.runners import EngineConfig, cache_layout, load_runner
from common.engine.plan import Constraint, Masks, Runner, StepPlan, StepRow
from common.models.config import load_config
from common.models.source import ModelFiles
from common.protocol.messages import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def open_runner(files: ModelFiles, *, num_blocks: int = 400, threads: int = 1, **settings: object) -> Runner:
    """float32, unless `settings` say otherwise: tests compare with other implementations exactly."""
    engine = EngineConfig(num_blocks=num_blocks, threads=threads, **{"dtype": "float32", **settings})  # type: ignore[arg-type]
    layout = cache_layout(load_config(files), engine)
    # stale bytes of an earlier owner, as NaN: nothing may read what was not written
    memory = [np.full((count, group.block_bytes), 0xFF, np.uint8) for group, count in layout.pools]
    return load_runner(files, engine, memory)


@dataclass
class Request:
    """One request. `begins`: the step from which on it may run. `chunk`: prompt tokens per step.

    `tables`: a block table of each cache group.
    """

    prompt: list[int]
    num_tokens: int
    sampling: SamplingParams = GREEDY
    chunk: int = 1 << 30
    begins: int = 0
    output: list[int] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)
    computed: int = 0
    constraint: Constraint | None = None
    key: int = field(default_factory=itertools.count().__next__)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def done(self) -> bool:
        return len(self.output) >= self.num_tokens


def run(runner: Runner, sequences: Sequence[Request], *, seed: int = 0) -> list[list[int]]:
    """All sequences to their ends, in shared steps; blocks are handed out in random order and reused."""
    pools = [_Free(runner, group, sequences, seed) for group in range(len(getattr(runner, "groups", [None])))]
    step = 0
    while not all(one.done for one in sequences):
        active = [one for one in sequences if not one.done and one.begins <= step]
        plan = StepPlan(step=step, rows=[_row(one, runner.block_tokens, pools) for one in active])
        for one, row, samples in zip(active, plan.rows, runner.execute(plan).rows, strict=True):
            one.computed += len(row.tokens)
            one.output += samples.tokens
            for pool, table in zip(pools, one.tables, strict=True):
                pool.let_go(table, pool.retention.first_token(one.computed) // runner.block_tokens)
                if one.done:
                    pool.blocks += [block for block in table if block != HOLE]
        step += 1
    return [one.output for one in sequences]


class _Free:
    """The blocks of a cache group that no sequence holds, in random order."""

    def __init__(self, runner: Any, group: int, sequences: Sequence[Request], seed: int) -> None:
        groups = getattr(runner, "groups", None)  # the simulated runner's is one, without tensors
        self.retention: Retention = groups[group].retention if groups else KEEP_ALL
        num_blocks = len(groups[group].pool) if groups else runner.num_blocks
        # of a prefix that another run computed
        held = {block for one in sequences if one.tables for block in one.tables[group]}
        self.blocks = [block for block in range(num_blocks) if block not in held]
        random.Random(seed).shuffle(self.blocks)

    def extend(self, table: list[int], num_blocks: int) -> None:
        table += [self.blocks.pop(0) for _ in range(num_blocks - len(table))]

    def let_go(self, table: BlockTable, num_blocks: int) -> None:
        """Take back the first blocks."""
        self.blocks += [block for block in table[:num_blocks] if block != HOLE]
        table.let_go(0, num_blocks)


class Whims:
    """A constraint that allows about a quarter of the tokens after each output, drawn from that output."""

    error = ""

    def fill(self, output: Sequence[int], proposal: Sequence[int], out: Masks, *, start: int = 0) -> None:
        for index in range(len(proposal) + 1):
            dice = np.random.default_rng([1, *output, *proposal[:index]])
            first, second = dice.integers(-(2**31), 2**31, (2, out.shape[1]), np.int64).astype(np.int32)
            out[index] = first & second


@contextmanager
def seen_logits(runner: Any) -> Iterator[list[torch.Tensor]]:
    """The logits of each step from here on, [samples, vocab]."""
    seen: list[torch.Tensor] = []
    logits = runner.logits

    def spy(rows: Sequence[StepRow]) -> torch.Tensor:
        found = logits(rows)
        seen.append(found.clone())
        return found

    runner.logits = spy
    try:
        yield seen
    finally:
        del runner.logits


def logits_of_first(runner: Any, requests: list[Request]) -> torch.Tensor:
    """Runs all; the logits of each token of the first one, which begins at once and outlives nobody's start."""
    with seen_logits(runner) as seen:
        run(runner, requests, seed=len(requests))
    tokens = len(requests[0].output)
    steps = -(-len(requests[0].prompt) // requests[0].chunk)  # that end before its first token is drawn, and with it
    return torch.stack([step[0] for step in seen[steps - 1 : steps - 1 + tokens]])


def _row(one: Request, block_tokens: int, pools: Sequence[_Free]) -> StepRow:
    end = min(one.computed + one.chunk, len(one.tokens))
    one.tables = one.tables or [BlockTable() for _ in pools]
    for pool, table in zip(pools, one.tables, strict=True):
        pool.extend(table, -(-end // block_tokens))
    blocks, *more_blocks = one.tables
    return StepRow(
        tokens=one.tokens[one.computed : end],
        start=one.computed,
        blocks=blocks,
        more_blocks=more_blocks,
        num_samples=int(end == len(one.tokens)),
        sampling=one.sampling,
        prompt_tokens=len(one.prompt),
        history=History(one.key, one.tokens, end, []),
        constraint=one.constraint,
        output=list(one.output),
    )
