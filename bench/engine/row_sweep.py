"""Steps of each number of rows, so that one that takes longer than a larger one is seen: `python -m bench.engine.row_sweep`.

    python -m bench.engine.row_sweep --models dummy:llama-3.1-8b:bf16,dummy:llama-3.1-8b-awq
    python -m bench.engine.row_sweep --models dummy:tiny:fp32 --device cpu --rows 1,2,3 --steps 4      in small

A model's precision may follow its name (those of `bench/engine/opening.py`). The runner alone: rows of --queries tokens each,
all of them sampled, behind --context tokens, as many steps in flight as the runner takes. Prints the median time between
results. A number is marked if a step with more rows takes at least 3 % less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from bench.common.machine import describe
from bench.common.table import markdown
from bench.engine.opening import open_runner, split_precision
from common.engine.plan import PendingStep, Runner, StepPlan, StepRow
from common.protocol.messages import SamplingParams
from common.runtime import parent_death

ROWS = "1,2,3,4,6,8,12,16,20,24,28,32,36,40,48,56,64,72,80,96,112,128"
BLOCK_TOKENS = 16
SLOWER = 1.03
TOKEN = 5


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.row_sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="dummy:llama-3.1-8b:bf16")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--queries", type=int, default=1, help="tokens of a row: 1, or one more than it verifies")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="auto")
    return parser.parse_args(argv)


def step_ms(runner: Runner, rows: int, options: argparse.Namespace) -> float:
    """Return the median time between the results of steps of so many rows."""
    blocks = -(-(options.context + options.queries) // BLOCK_TOKENS)
    plan = [
        StepRow(
            tokens=[TOKEN] * options.queries,
            start=options.context,
            blocks=list(range(index * blocks, (index + 1) * blocks)),
            num_samples=options.queries,
            sampling=SamplingParams(temperature=0.0),
            prompt_tokens=options.context,
        )
        for index in range(rows)
    ]
    flights: deque[PendingStep] = deque()
    ended: list[float] = []
    for step in range(1, options.steps + 2):
        flights.append(runner.submit(StepPlan(step, plan)))
        if len(flights) == runner.run_ahead:
            flights.popleft().result()
            ended.append(time.perf_counter())
    while flights:
        flights.popleft().result()
    return 1e3 * median(later - earlier for earlier, later in pairwise(ended))


def cells(found: Mapping[int, float]) -> list[str]:
    """Return a row of the table. found: milliseconds by the number of rows, in rising order."""
    sizes = list(found)
    return [
        f"{found[size]:.2f}" + (" !" if any(found[size] > SLOWER * found[more] for more in sizes[place + 1 :]) else "")
        for place, size in enumerate(sizes)
    ]


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    sizes = sorted(int(size) for size in options.rows.split(","))
    blocks = 1 + max(sizes) * -(-(options.context + options.queries) // BLOCK_TOKENS)
    table: list[list[str]] = []
    for given in options.models.split(","):
        model, precision = split_precision(given)
        settings = {"device": options.device, "max_running": max(sizes), "token_budget": 1024, "block_tokens": BLOCK_TOKENS}
        runner = open_runner(model, precision, num_blocks=blocks, **settings).runner
        step_ms(runner, sizes[0], options)
        table.append([given, *cells({size: step_ms(runner, size, options) for size in sizes})])
        del runner
    print(f"{describe()}\n")
    print(markdown(["ms a step", *map(str, sizes)], table))
    return 0


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
