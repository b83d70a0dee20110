"""Steps of the engine on a CPU with a head behind them, alone: `python -m bench.cpu.head`.

    python -m bench.cpu.head                                 0 to 4 drafted tokens a step, greedy, the head that ships
    python -m bench.cpu.head --drafts 3 --temperature 0.7    others
    python -m bench.cpu.head --head FOLDER                   another head

Chat prompts are answered with each number of drafts in turn, because a machine's speed changes. All that the head drafts is
verified in the next step. Prints a table in Markdown: means over all steps of all prompts, and the median over the prompts of
how many times as many tokens a second there are as with the first number of drafts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from statistics import median

from msgspec import structs

from bench.common.machine import describe
from bench.common.table import markdown, number
from bench.cpu.chat import PROMPTS
from common.engine.cpu.head import Head
from common.engine.cpu.runner import CpuRunner
from common.engine.load.runners import EngineConfig, load_runner
from common.engine.outcomes import accept
from common.engine.plan import StepPlan, StepRow
from common.models.head_folder import find_head
from common.models.head_weights import load_head
from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.messages import SamplingParams
from common.text.bundle import load_bundle

MARGIN = 64
"""Tokens for which there is room behind an answer: proposals, and what the last step gives."""


@dataclass
class Spent:
    """Totals of one number of drafts. rates: tokens per second of each prompt."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    head_s: float = 0.0
    rates: list[float] = field(default_factory=list)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu.head", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--head", default="auto")
    parser.add_argument("--drafts", default="0,1,2,3,4", help="numbers of drafted tokens, the baseline first")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def answer(runner: CpuRunner, prompt: list[int], row: StepRow, tokens: int, spent: Spent) -> None:
    """Compute an answer and add its steps to `spent`, except for the first, which computes the prompt. row: the fields that all
    steps share."""
    text, proposal, seconds, first = list(prompt), list[int](), 0.0, 0
    for step in range(tokens):
        start = len(text) - 1 if step else 0
        mine = structs.replace(row, tokens=[*text[start:], *proposal], start=start, num_samples=1 + len(proposal))
        begun = time.perf_counter()
        result = runner.execute(StepPlan(0, [mine]))
        took_s = time.perf_counter() - begun
        samples = result.rows[0]
        text += samples.tokens[: accept(proposal, samples.tokens) + 1]
        proposal = [] if samples.drafted is None else samples.drafted.tokens
        if step:
            spent.steps += 1
            spent.head_s += sum(one.seconds for one in result.passes)
            seconds += took_s
        else:
            first = len(text)
        if len(text) >= len(prompt) + tokens:
            break
    spent.tokens += len(text) - first
    spent.seconds += seconds
    spent.rates.append((len(text) - first) / seconds)


def main() -> None:
    options = parse()
    files = resolve(options.model)
    bundle = load_bundle(files)
    prompts = [bundle.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS[: options.prompts]]
    longest = max(map(len, prompts)) + options.tokens + MARGIN
    config = EngineConfig(threads=options.threads, num_blocks=-(-longest // EngineConfig().block_tokens))
    runner, found = load_runner(files, config), find_head(options.head, files)
    if not isinstance(runner, CpuRunner) or found is None:
        raise SystemExit("there is no head for this model on a CPU")
    runner.head = Head(load_head(found, runner.decoder, files.name), max_sequences=4, threads=options.threads)
    runner.warm_up()
    numbers = [int(word) for word in options.drafts.split(",")]
    spent = {drafts: Spent() for drafts in numbers}
    blocks, serial = list(range(config.num_blocks)), 0
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=options.temperature, seed=index)
        for drafts in numbers:
            serial += 1
            row = StepRow([], 0, blocks, 1, sampling, len(prompt), serial=serial if drafts else -1, drafts=drafts)
            answer(runner, prompt, row, options.tokens, spent[drafts])
    print(f"{describe()}\n")
    titles = ["drafts", "tokens a step", "ms a step", "of these the head", "tokens/s, times", "worst"]
    rows: list[list[str]] = []
    for drafts, one in spent.items():
        times = [rate / plain for rate, plain in zip(one.rates, spent[numbers[0]].rates, strict=True)]
        each = (one.tokens / one.steps, 1e3 * one.seconds / one.steps, 1e3 * one.head_s / one.steps, median(times), min(times))
        rows.append([str(drafts), *(number(value, 2) for value in each)])
    print(markdown(titles, rows))


if __name__ == "__main__":
    main()
