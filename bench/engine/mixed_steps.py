"""What a part of a prompt adds to a step of decoding rows: `python -m bench.engine.mixed_steps`.

    python -m bench.engine.mixed_steps --rows 4,12 --context 8192 --parts 0,116,244,372,500
    python -m bench.engine.mixed_steps --rows 12 --parts 244 --by-kernel
    python -m bench.engine.mixed_steps --model dummy:tiny --precision fp32 --device cpu --context 64 --prefix 32 --parts 0,16

A decode worker with an objective parts prompts so that a step keeps it; how many tokens of prompts a second it computes beside
its rows is then tokens over the step's time. The same step is submitted again and again, as a runner that runs ahead gets
them. "alone": the time of the part in a step of its own. --by-kernel: where the GPU spends the step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from bench.common.machine import describe
from bench.common.table import markdown, number
from bench.engine.by_kernel import table_of
from bench.engine.measure import settings_of
from bench.engine.opening import PRECISIONS, Opening, open_runner
from common.cache.block_table import BlockTable
from common.engine.plan import StepPlan, StepRow
from common.protocol.messages import SamplingParams
from common.runtime import parent_death

STEPS = 20
TIMES = 5
KERNELS = 14
SAMPLING = SamplingParams(temperature=0.0)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.mixed_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="bf16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", default="12", help="that decode")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each")
    parser.add_argument("--parts", default="0,116,244,372,500", help="tokens of the part; 0: rows alone")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens of the prompt before the part")
    parser.add_argument("--by-kernel", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine's")
    return parser.parse_args(argv)


class Steps:
    """Plans of rows and a part, over blocks that are handed out once."""

    def __init__(self, opening: Opening, context: int, prefix: int) -> None:
        self.runner, self.context, self.prefix = opening.runner, context, prefix
        self._step = 0
        self._tables: dict[object, list[BlockTable]] = {}
        self._next = 0

    def _row(self, name: object, start: int, num_tokens: int, sampled: int) -> StepRow:
        groups = getattr(self.runner, "groups", None)
        sizes = [len(group.pool) for group in groups] if groups else [self.runner.num_blocks]
        count = -(-(start + num_tokens) // self.runner.block_tokens)
        tables = self._tables.setdefault(name, [BlockTable() for _ in sizes])
        missing = max(0, count - len(tables[0]))
        for table, size in zip(tables, sizes, strict=True):  # a window's blocks serve again: only times count
            table += [block % size for block in range(self._next, self._next + missing)]
        self._next += missing
        blocks, *more = tables
        return StepRow([7] * num_tokens, start, blocks, sampled, SAMPLING, start + num_tokens, more_blocks=more)

    def plan(self, rows: int, part: int) -> StepPlan:
        planned = [self._row(row, self.context - 1, 1, 1) for row in range(rows)]
        if part:
            planned.append(self._row("prompt", self.prefix, part, 0))
        self._step += 1
        return StepPlan(step=self._step, rows=planned)

    def run(self, rows: int, part: int, times: int = STEPS) -> float:
        """Seconds a step."""
        begun, pending = time.perf_counter(), None
        for _ in range(times):
            after = self.runner.submit(self.plan(rows, part)) if self.runner.run_ahead > 1 else None
            if after is None:
                self.runner.execute(self.plan(rows, part))
            elif pending is not None:
                pending.result()
            pending = after
        if pending is not None:
            pending.result()
        return (time.perf_counter() - begun) / times


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    counts, parts = ([int(each) for each in text.split(",")] for text in (options.rows, options.parts))
    settings = {"device": options.device, "max_running": max(256, *counts), "token_budget": 8192} | settings_of(options.set)
    if options.device == "cpu":
        settings.setdefault("num_blocks", 4096)
    steps = Steps(open_runner(options.model, options.precision, **settings), options.context, options.prefix)
    print(f"{describe()} · {options.model} {options.precision}\n")
    print(f"    python -m bench.engine.mixed_steps {' '.join(sys.argv[1:])}\n")
    lines: list[list[str]] = []
    for rows in counts:
        for part in parts:
            if not rows + part:
                continue
            steps.run(rows, part)
            times = [steps.run(rows, part) for _ in range(TIMES)]
            if part:
                steps.run(0, part)
            seconds = statistics.median(times)
            alone = statistics.median(steps.run(0, part) for _ in range(TIMES)) if part else 0.0
            rate = number(part / seconds, 0) if part else "—"
            lines.append([str(rows), str(part), number(seconds * 1e3, 2), number(alone * 1e3, 2) if part else "—", rate])
    print(markdown(["rows", "part", "ms a step", "ms alone", "prompt tokens/s"], lines))
    if options.by_kernel:
        for rows in counts:
            for part in parts:
                if rows + part:
                    name = f"{STEPS} steps of {rows} rows and a part of {part}"
                    print("\n" + table_of(name, lambda rows=rows, part=part: STEPS * steps.run(rows, part), KERNELS))
    return 0


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
