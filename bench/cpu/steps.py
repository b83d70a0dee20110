"""Steps of the engine on a CPU, alone: `python -m bench.cpu.steps`.

    python -m bench.cpu.steps                                    8 bits on 1 and 2 threads, and bfloat16
    python -m bench.cpu.steps --engines auto:1,float32:2         other precisions and numbers of threads
    python -m bench.cpu.steps --shapes 1x1,16x3 --keys 1000      rows x tokens, behind so many keys

Engines take turns, step by step, because a machine's speed changes. Prints a table in Markdown: median times of a step, in ms.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import cast, get_args

from bench.common.machine import describe
from bench.common.table import markdown, number
from common.engine.load.precision import DtypeSetting
from common.engine.load.runners import EngineConfig, load_runner
from common.engine.plan import Runner, StepPlan, StepRow
from common.models.config import load_config
from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.messages import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
VERIFIED = 32
"""Rows of up to so many tokens want a sample of each, as guesses that are checked do; longer ones are prompts."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu.steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--engines", default="auto:1,auto:2,bfloat16:1", help="dtype:threads")
    parser.add_argument("--shapes", default="1x1,1x4,4x1,16x1,16x3,1x256", help="rows x tokens")
    parser.add_argument("--keys", type=int, default=120, help="of each row, before its tokens")
    parser.add_argument("--turns", type=int, default=30)
    return parser.parse_args()


class Engine:
    """A runner in a thread of its own: how many threads a library takes is a property of the one that calls it."""

    def __init__(self, name: str, model: str, num_blocks: int) -> None:
        dtype, _, threads = name.partition(":")
        if dtype not in get_args(DtypeSetting) or not threads.isdigit():
            raise SystemExit(f"{name}: an engine is dtype:threads")
        self.name = name
        config = EngineConfig(dtype=cast(DtypeSetting, dtype), threads=int(threads), num_blocks=num_blocks)
        self._thread = ThreadPoolExecutor(1)
        self._runner: Runner = self._thread.submit(load_runner, resolve(model), config).result()

    def step_s(self, rows: list[StepRow]) -> float:
        begun = time.perf_counter()
        self._thread.submit(self._runner.execute, StepPlan(0, rows)).result()
        return time.perf_counter() - begun


def rows_of(shape: str, keys: int, block_tokens: int, rng: random.Random, vocab_size: int) -> list[StepRow]:
    """A prompt begins at its first token; what decodes is behind `keys` others, whose K and V are whatever the pool holds."""
    rows, tokens = map(int, shape.split("x"))
    start = keys if tokens <= VERIFIED else 0
    held = -(-(start + tokens) // block_tokens)
    return [
        StepRow(
            tokens=[rng.randrange(vocab_size) for _ in range(tokens)],
            start=start,
            blocks=list(range(row * held, (row + 1) * held)),
            num_samples=tokens if tokens <= VERIFIED else 1,
            sampling=GREEDY,
            prompt_tokens=1,
        )
        for row in range(rows)
    ]


def main() -> None:
    options = parse()
    shapes, names = options.shapes.split(","), options.engines.split(",")
    block_tokens, vocab_size = EngineConfig().block_tokens, load_config(resolve(options.model)).vocab_size
    rng = random.Random(0)
    cases = {shape: rows_of(shape, options.keys, block_tokens, rng, vocab_size) for shape in shapes}
    num_blocks = 1 + max(row.blocks[-1] for rows in cases.values() for row in rows)
    engines = [Engine(name, options.model, num_blocks) for name in names]
    times: dict[tuple[str, str], list[float]] = {}
    for shape, rows in cases.items():
        for turn in range(-2, options.turns):
            for engine in engines:
                spent = engine.step_s(rows)
                if turn >= 0:
                    times.setdefault((shape, engine.name), []).append(spent)
        print(f"{shape}: done", file=sys.stderr, flush=True)
    print(f"{describe()}\n")
    titles = ["rows x tokens", *(f"{name}, ms" for name in names)]
    print(markdown(titles, [[shape, *(number(1000 * median(times[shape, name]), 2) for name in names)] for shape in shapes]))


if __name__ == "__main__":
    main()
