"""Times drawing tokens on a CPU: `python -m bench.cpu.sampling`. Compiled loops and NumPy's take turns.

A real model computes the logits, behind pieces of the README. Prints a table in Markdown: the median time of one draw in µs,
and whether both drew the same tokens.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch

from bench.common.machine import describe
from bench.common.table import markdown, number
from common.engine.load.runners import EngineConfig, load_runner
from common.engine.plan import StepPlan, StepRow
from common.models.source import DEFAULT_MODEL, resolve
from common.ops.sampling import host_loops
from common.ops.sampling.sample import Draw, sample_tokens
from common.protocol.messages import SamplingParams
from common.text.bundle import load_bundle

KINDS = {
    "T 0.7": Draw(0.7, 0, 1.0, 0.0, 1, 0),
    "T 1": Draw(1.0, 0, 1.0, 0.0, 1, 0),
    "T 0.7, top-p 0.9": Draw(0.7, 0, 0.9, 0.0, 1, 0),
    "T 1, top-p 0.95": Draw(1.0, 0, 0.95, 0.0, 1, 0),
    "T 0.8, top-k 50": Draw(0.8, 50, 1.0, 0.0, 1, 0),
    "T 0.6, top-k 20, top-p 0.95": Draw(0.6, 20, 0.95, 0.0, 1, 0),
    "T 1, min-p 0.05": Draw(1.0, 0, 1.0, 0.05, 1, 0),
}
WINDOW, STRIDE = 96, 40
"""Tokens of each piece, and from the start of one piece to the next."""


def logits_of(model: str, count: int) -> torch.Tensor:
    """Return the logits behind `count` pieces of the README, float32 [count, vocab]."""
    files = resolve(model)
    runner = load_runner(files, EngineConfig(threads=2, num_blocks=16))
    tokens = load_bundle(files).tokenizer.encode((Path(__file__).parents[2] / "README.md").read_text())
    greedy, seen = SamplingParams(temperature=0.0), list[torch.Tensor]()
    compute = runner.logits  # pyright: ignore[reportAttributeAccessIssue]

    def noted(*arguments: object) -> torch.Tensor:
        seen.append(compute(*arguments).clone())
        return seen[-1]

    runner.logits = noted  # pyright: ignore[reportAttributeAccessIssue]
    for index in range(count):
        piece = tokens[STRIDE * index :][:WINDOW]
        runner.execute(StepPlan(0, [StepRow(piece, 0, list(range(8)), 1, greedy, len(piece))]))
    return torch.cat(seen)


def drawn(logits: torch.Tensor, draws: list[Draw]) -> tuple[list[int], list[float]]:
    """Return the tokens, and the time of each draw in µs."""
    tokens, times = list[int](), list[float]()
    for row, draw in zip(logits, draws, strict=True):
        begun = time.perf_counter()
        tokens += sample_tokens(row[None], [draw])
        times.append(1e6 * (time.perf_counter() - begun))
    return tokens, times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu.sampling", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    logits = logits_of(options.model, options.places)
    compiled = host_loops.compiled_loops
    rows: list[list[str]] = []
    for kind, draw in KINDS.items():
        draws = [draw._replace(position=place) for place in range(len(logits))]
        times: dict[bool, list[float]] = {True: [], False: []}
        found: dict[bool, list[int]] = {}
        for _ in range(options.turns):
            for is_compiled in (False, True):
                host_loops.compiled_loops = compiled if is_compiled else lambda: None
                found[is_compiled], took = drawn(logits, draws)
                times[is_compiled] += took
        same = "same" if found[True] == found[False] else "different"
        rows.append([kind, number(median(times[False])), number(median(times[True])), same])
    host_loops.compiled_loops = compiled
    print(f"{describe()}\n\n{markdown(['draws', 'NumPy, µs', 'compiled, µs', 'tokens'], rows)}")


if __name__ == "__main__":
    main()
