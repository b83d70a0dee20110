"""What lookup on the device costs: steps of an engine with and without its launch, in turns: `python -m bench.engine.lookup`.

    python -m bench.engine.lookup --model dummy:llama-3.1-8b --precision bf16 --rows 1,8,64,256
    python -m bench.engine.lookup --context 4096 --capacity 8192 --room 0

A step verifies --room tokens in each row. With the launch, each row's text grows by a token, its end is searched, and the
proposal is written where the step reads it (`common/ops/lookup`). Texts, and the tokens that they grow by, are drawn from a
few, so that each search walks all the links it may. Medians; "more" is what a step takes longer. "alone": launches in a CUDA
graph, without the host's part. "1024 of a prompt": linking as many tokens in each text. Needs a GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bench.common.machine import describe
from bench.common.table import markdown
from bench.engine.opening import PRECISIONS, open_runner
from bench.engine.timing import seconds_per_call
from common.engine.gpu.pinned import to_device
from common.engine.plan import StepPlan, StepRow
from common.ops.lookup.device_texts import MAX_PROPOSAL, DeviceTexts, FollowedStep, TextPart, new_texts, pack_parts
from common.ops.lookup.follow import DEPTHS, FollowedRow, extend_texts, follow_rows, pack_rows
from common.protocol.messages import SamplingParams

PART = 1024
TOKENS = 8
"""Different tokens of a text: each pair occurs often."""


class Case(NamedTuple):
    """rows: of a step, after `context` tokens each. room: tokens that a row verifies. capacity: tokens that a text keeps."""

    rows: int
    context: int
    room: int
    capacity: int
    steps: int


class Found(NamedTuple):
    """Seconds: of a step without and with the launch, of the launch alone, and of linking `PART` tokens in each text."""

    without: float
    with_launch: float
    alone: float
    part: float


def filled(case: Case, device: torch.device) -> DeviceTexts:
    """Return texts of `case.context` tokens."""
    texts, draws = new_texts(case.rows, case.capacity, device), random.Random(1)
    parts = [TextPart(slot, draws.choices(range(TOKENS), k=case.context), is_first=True) for slot in range(case.rows)]
    extend_texts(texts, to_device(pack_parts(parts), device), len(parts))
    return texts


def plan_of(case: Case, runner: Any) -> StepPlan:
    """:raises ValueError: if the rows don't fit into the KV pools."""
    per_row = -(-(case.context + case.room + 1) // runner.block_tokens)
    if case.rows * per_row > min(len(group.pool) for group in runner.groups):
        raise ValueError(f"{case.rows} rows of {case.context} tokens don't fit into the KV pools")
    rows: list[StepRow] = []
    for row in range(case.rows):
        blocks = list(range(row * per_row, (row + 1) * per_row))
        tokens = [1] * (1 + case.room)
        more = [blocks] * (len(runner.groups) - 1)
        rows.append(StepRow(tokens, case.context, blocks, len(tokens), SamplingParams(), case.context, more_blocks=more))
    return StepPlan(1, rows)


def rows_of(case: Case) -> list[FollowedRow]:
    width = 1 + case.room
    return [FollowedRow(i, i * width, case.context, i * width, case.room) for i in range(case.rows)]


def following(case: Case, runner: Any, texts: DeviceTexts) -> Callable[..., None]:
    """Return what settles a step's open rows, and then has the device propose in all of its rows."""
    settle, rows, depths = runner._settle, rows_of(case), [[case.room] * DEPTHS]
    drawn = random.Random(2).choices(range(TOKENS), k=case.rows * (1 + case.room))
    sampled = torch.tensor(drawn, device=texts.tokens.device)

    def settle_and_follow(given: Sequence[StepRow], packed: Any, shape: Any) -> None:
        settle(given, packed, shape)
        inputs = runner._step_inputs(shape)
        words = to_device(pack_rows(rows, depths), texts.tokens.device)
        follow_rows(texts, words, case.rows, FollowedStep(sampled, inputs.tokens, inputs.positions))

    return settle_and_follow


def measure(case: Case, runner: Any, turns: int) -> Found:
    """runner: a `DeviceRunner`."""
    device: torch.device = runner.groups[0].pool.device
    texts, plan, settle = filled(case, device), plan_of(case, runner), runner._settle
    with_lookup = following(case, runner, texts)

    def step_s(settling: Callable[..., None]) -> float:
        """Return the seconds of a step, one ahead of the host as in a worker."""
        runner._settle = settling
        try:
            runner.execute(plan)
            begun = time.perf_counter()
            flight = runner.submit(plan)
            for _ in range(case.steps - 1):
                later = runner.submit(plan)
                flight.result()
                flight = later
            flight.result()
            return (time.perf_counter() - begun) / case.steps
        finally:
            runner._settle = settle

    times = [(step_s(settle), step_s(with_lookup)) for _ in range(turns)]
    count = case.rows * (1 + case.room)
    step = FollowedStep(
        sampled=torch.randint(TOKENS, (count,), device=device),
        tokens=torch.zeros(count, dtype=torch.int64, device=device),
        positions=torch.full((count,), case.context, device=device),
    )
    words = to_device(pack_rows(rows_of(case), [[case.room] * DEPTHS]), device)
    parts = [TextPart(slot, [token % TOKENS for token in range(PART)]) for slot in range(case.rows)]
    part_words = to_device(pack_parts(parts), device)
    return Found(
        without=statistics.median(one for one, _ in times),
        with_launch=statistics.median(one for _, one in times),
        alone=seconds_per_call([lambda: follow_rows(texts, words, case.rows, step)], device),
        part=seconds_per_call([lambda: extend_texts(texts, part_words, case.rows)], device),
    )


def line_of(case: Case, found: Found) -> list[str]:
    more = found.with_launch - found.without
    return [
        str(case.rows),
        f"{1e3 * found.without:.3f}",
        f"{1e3 * found.with_launch:.3f}",
        f"{1e6 * more:.1f}",
        f"{more / found.without:.2%}",
        f"{1e6 * found.alone:.1f}",
        f"{1e6 * found.part:.0f}",
    ]


TITLES = ["rows", "step, ms", "with lookup, ms", "more, µs", "more", "alone, µs", f"{PART} of a prompt, µs"]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.lookup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:llama-3.1-8b", help="as penstock's --model")
    parser.add_argument("--precision", default="bf16", choices=list(PRECISIONS))
    parser.add_argument("--rows", default="1,8,64,256", help="of a step; several between commas")
    parser.add_argument("--context", type=int, default=512, help="tokens of each text")
    parser.add_argument("--capacity", type=int, default=4096, help="tokens of a text that are kept, a power of two")
    parser.add_argument("--room", type=int, default=4, help=f"tokens of a row that are verified, at most {MAX_PROPOSAL}")
    parser.add_argument("--steps", type=int, default=50, help="of a turn")
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    sizes = [int(rows) for rows in options.rows.split(",")]
    opening = open_runner(
        options.model,
        options.precision,
        device="cuda",
        max_running=max(sizes),
        token_budget=max(2048, max(sizes) * options.room),
        max_model_len=options.context + options.room + 64,
    )
    lines: list[list[str]] = []
    for rows in sizes:
        case = Case(rows, options.context, options.room, options.capacity, options.steps)
        lines.append(line_of(case, measure(case, opening.runner, options.turns)))
        print("  " + " ".join(lines[-1]), file=sys.stderr, flush=True)
    print(f"# {describe()}\n\n{options.model}, {opening.precision}\n\n{markdown(TITLES, lines)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
