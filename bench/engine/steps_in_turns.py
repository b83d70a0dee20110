"""Decode steps of several models, in turns in one process: `python -m bench.engine.steps_in_turns`.

    python -m bench.engine.steps_in_turns --models dummy:llama-3.1-8b-awq,dummy:llama-3.1-8b:bf16 --rows 1,2,4,8

One process and one card, so that step times of two formats, say, can be divided. A model's precision may follow its name (those
of `bench/engine/opening.py`). A turn is one run of each model: `--steps` steps of so many
rows behind prompts of `--context` tokens, of which the median time between results counts. Prints the median of turns, the
fastest and the slowest, and how many times as fast the first model is as each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median

from bench.common.machine import describe
from bench.common.table import markdown
from bench.engine.measure import Measurement
from bench.engine.opening import open_runner, split_precision
from common.runtime import parent_death


def opened(given: str, *, device: str, max_rows: int, context: int, steps: int) -> Measurement:
    """given: a model, perhaps with its precision."""
    model, precision = split_precision(given)
    tokens = max_rows * (context + steps + 64)
    settings = {"device": device, "max_running": max_rows, "token_budget": max(1024, context), "block_tokens": 16}
    opening = open_runner(model, precision, num_blocks=1 + 2 * tokens // 16, **settings)
    return Measurement(opening, token_budget=max(1024, context), max_rows=max_rows)


def step_ms(measurement: Measurement, rows: int, context: int, steps: int) -> float:
    """The median of one run."""
    return 1e3 * median(measurement.generate([context] * rows, steps + 1).decode_gaps_s())


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.steps_in_turns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="dummy:llama-3.1-8b-awq,dummy:llama-3.1-8b:bf16")
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(argv)
    names: list[str] = options.models.split(",")
    sizes = [int(size) for size in options.rows.split(",")]
    given = {"context": options.context, "steps": options.steps}
    engines = {name: opened(name, device=options.device, max_rows=max(sizes), **given) for name in names}
    table: list[list[str]] = []
    for size in sizes:
        found: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(1 + options.turns):
            for name, engine in engines.items():
                took = step_ms(engine, size, **given)
                if turn:  # the first may compile
                    found[name].append(took)
        first = median(found[names[0]])
        cells = [f"{median(times):.3f} ({min(times):.3f} to {max(times):.3f})" for times in found.values()]
        table.append([str(size), *cells, *(f"{median(found[name]) / first:.2f}" for name in names[1:])])
    print(describe(), end="\n\n")
    print(markdown(["rows", *(f"{name}, ms" for name in names), *(f"{name} / first" for name in names[1:])], table))
    return 0


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
