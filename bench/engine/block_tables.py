"""Host time and bytes of preparing a step, with block tables kept on the device and sent whole.

`python -m bench.engine.block_tables [--steps 200] [--case 256x8k …]`. It times what a step makes the host do before its launch:
which graph it takes, and writing its buffer. No kernel runs, so no GPU is needed. Tables are sent whole where a row has a plain
list instead of a `BlockTable`. Blocks are in random order, and rows grow by as many tokens as a step decodes or accepts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from common.cache.block_table import BlockTable
from common.engine.gpu.block_tables import MAX_CHANGE_BYTES, BlockTables, max_table_ids
from common.engine.gpu.graphs import ShapeTable, exact_shape
from common.engine.gpu.layer_cost import LayerCost
from common.engine.gpu.step_buffers import StepPacker, buffer_bytes
from common.engine.plan import StepRow
from common.protocol.messages import SamplingParams

BLOCK_TOKENS = 16
MAX_ROWS, MAX_TOKENS = 256, 4096 + 64
SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True)
class Case:
    """`rows` that decode after `context` tokens, each with `queries` tokens (one, or proposed ones too), and `chunk` tokens of
    a prompt after `prefix`, another one in each step; in `groups` cache groups."""

    rows: int
    context: int
    queries: int = 1
    chunk: int = 0
    prefix: int = 0
    groups: int = 1


CASES = {
    "1x512": Case(1, 512),
    "8x512": Case(8, 512),
    "32x2k": Case(32, 2048),
    "256x512": Case(256, 512),
    "256x8k": Case(256, 8192),
    "8x32k": Case(8, 32768),
    "2x4x512 verified": Case(2, 512, queries=4),
    "8x4x2k verified": Case(8, 2048, queries=4),
    "16x5x2k verified": Case(16, 2048, queries=5),
    "8x2k + 256 after 2k": Case(8, 2048, chunk=256, prefix=2048),
    "4x2k + 512 after 8k": Case(4, 2048, chunk=512, prefix=8192),
    "2048 alone": Case(0, 0, chunk=2048),
    "32x2k, 2 groups": Case(32, 2048, groups=2),
}


class Steps:
    """The steps of a case, one after the other."""

    def __init__(self, case: Case, steps: int) -> None:
        longest = max(case.context + steps * case.queries, case.prefix + case.chunk) + BLOCK_TOKENS
        per_row = -(-longest // BLOCK_TOKENS)
        self.num_blocks = (case.rows + 1) * per_row
        self._free = list(range(self.num_blocks))
        random.Random(1).shuffle(self._free)
        self._case = case
        self._lengths = [case.context + 7 * row % BLOCK_TOKENS for row in range(case.rows)]
        self._tables = [[BlockTable() for _ in range(case.groups)] for _ in range(case.rows)]
        for tables, length in zip(self._tables, self._lengths, strict=True):
            self._grow(tables, length)

    def _grow(self, tables: list[BlockTable], num_tokens: int) -> None:
        new = [self._free.pop() for _ in range(-(-num_tokens // BLOCK_TOKENS) - len(tables[0]))]
        for table in tables:
            table += new

    def next(self, step: int, *, kept: bool) -> list[StepRow]:
        case = self._case
        rows: list[StepRow] = []
        for index, (tables, length) in enumerate(zip(self._tables, self._lengths, strict=True)):
            self._grow(tables, length + case.queries)
            fed = case.queries == 1
            tokens = [-1] if fed else [5] * case.queries
            rows.append(_row(tables, tokens, length, case.queries, index if fed else -1, kept=kept))
            self._lengths[index] += 1 + step % case.queries
        if case.chunk:
            prompt = [BlockTable() for _ in range(case.groups)]
            self._grow(prompt, case.prefix + case.chunk)
            rows.append(_row(prompt, [7] * case.chunk, case.prefix, 0, -1, kept=kept))
            self._free += prompt[0]
        return rows


def _row(tables: list[BlockTable], tokens: list[int], start: int, samples: int, feed: int, *, kept: bool) -> StepRow:
    blocks, *more = tables if kept else map(list, tables)
    return StepRow(tokens, start, blocks, samples, SAMPLING, 16, feed=feed, more_blocks=more)


def measure(case: Case, steps: int, *, kept: bool) -> tuple[float, float, float]:
    """Return of a step the median and the 10th percentile of the seconds, and the mean of the bytes uploaded.

    The first step, in which every table is new, is not counted.
    """
    made = Steps(case, steps)
    num_blocks = [made.num_blocks] * case.groups
    max_ids = max_table_ids(num_blocks, MAX_ROWS, -(-(case.context + steps * case.queries) // BLOCK_TOKENS))
    device = torch.device("cpu")
    tables = BlockTables(num_blocks=num_blocks, max_ids=max_ids, max_tables=MAX_TOKENS * case.groups, device=device)
    packer = StepPacker(tables, block_tokens=BLOCK_TOKENS, vocab_size=128256)
    size = buffer_bytes(MAX_TOKENS, MAX_TOKENS, MAX_CHANGE_BYTES, case.groups)
    buffers = [np.zeros(size, np.uint8) for _ in range(3)]
    shapes = ShapeTable(MAX_ROWS, MAX_TOKENS, cost=LayerCost(0.7e-6, 0.0))
    seconds: list[float] = []
    uploaded: list[int] = []
    for step in range(steps):
        rows = made.next(step, kept=kept)
        begun = time.perf_counter()
        packed = packer.pack(rows, buffers[step % 3], shapes.choose(rows) or exact_shape(rows))
        seconds.append(time.perf_counter() - begun)
        uploaded.append(packed.changes.stop)
        tables.apply(torch.from_numpy(buffers[step % 3])[packed.changes])
    return statistics.median(seconds[1:]), float(np.percentile(seconds[1:], 10)), statistics.fmean(uploaded[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    given = parser.parse_args()
    print(f"{'':20s} {'kept: median µs':>16s} {'p10':>8s} {'bytes':>10s} {'whole: median µs':>18s} {'p10':>8s} {'bytes':>10s}")
    for name in given.case or CASES:
        cells = [measure(CASES[name], given.steps, kept=kept) for kept in (True, False)]
        print(
            f"{name:20s}",
            *(f"{m * 1e6:{w}.0f} {low * 1e6:8.0f} {size:10,.0f}" for (m, low, size), w in zip(cells, (16, 18), strict=True)),
            flush=True,
        )


if __name__ == "__main__":
    main()
