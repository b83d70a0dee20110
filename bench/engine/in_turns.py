"""A model with and without one way to compute its linears, in turns in one process: `python -m bench.engine.in_turns`.

    python -m bench.engine.in_turns --model dummy:llama-3.1-8b-uniform --without specialised --cells 1x8192,8x4096

A kernel that is faster alone need not make a model faster: at a card's power limit, a kernel that draws more power slows the
others down. "with" runs the candidates that were the fastest when the model was loaded; "without" replaces those of one kind by
the first candidate of another (`common/ops/linear/candidates.py`). Steps of up to 2,048 tokens run in CUDA graphs that were
captured with the fastest, so only cells with longer steps show a difference. Prints the median milliseconds of whole cells,
and how many times as fast "with" is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import get_args

from bench.common.machine import describe
from bench.common.table import markdown
from bench.engine.cells import parse_cells
from bench.engine.measure import Measurement
from bench.engine.opening import PRECISIONS, open_runner
from common.ops.linear import device as linear_device
from common.ops.linear.candidates import Candidate, Kind, Op
from common.ops.linear.weight import LinearWeight
from common.runtime import parent_death

TOKEN_BUDGET = 16384
MAX_ROWS = 512

Choose = Callable[[Op, LinearWeight, int, bool], Candidate]


def without(kind: Kind, choose: Choose) -> Choose:
    """As `choose`, but for candidates of `kind`, in whose place comes the first of another."""

    def chosen(op: Op, weight: LinearWeight, size: int, quantised: bool) -> Candidate:
        found = choose(op, weight, size, quantised)
        if found.kind != kind:
            return found
        return next(one for one in linear_device.options(op, weight, size, quantised) if one.kind != kind)

    return chosen


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.in_turns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:llama-3.1-8b-uniform")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="bf16")
    parser.add_argument("--without", choices=get_args(Kind), default="specialised")
    parser.add_argument("--cells", type=parse_cells, default=parse_cells("1x8192,8x4096"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(argv)
    settings = {"num_blocks": 4096} if options.device == "cpu" else {}
    opening = open_runner(
        options.model, options.precision, device=options.device, max_running=MAX_ROWS, token_budget=TOKEN_BUDGET, **settings
    )
    measurement = Measurement(opening, token_budget=TOKEN_BUDGET, max_rows=MAX_ROWS)
    usual = linear_device._choose
    ways = {"with": usual, "without": without(options.without, usual)}
    rows: list[list[str]] = []
    try:
        for cell in options.cells:
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(1 + options.turns):
                for way, choose in ways.items():
                    linear_device._choose = choose
                    linear_device.forget_choices()
                    took = measurement.generate(cell.lengths(), cell.out).seconds
                    if turn:  # the first of each compiles
                        seconds[way].append(took)
            found = {way: median(times) for way, times in seconds.items()}
            rows.append([str(cell), *(f"{1e3 * one:.1f}" for one in found.values()), f"{found['without'] / found['with']:.3f}"])
    finally:
        linear_device._choose = usual
        linear_device.forget_choices()
    print(describe(), end="\n\n")
    print(markdown(["cell", f"with {options.without}, ms", "without", "times as fast"], rows))
    return 0


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
