"""Lets a target answer prompts with Penstock's own engine, and writes the answers as shards.

    python -m recipes.draft.generate build/draft --minutes 8 --max-running 512

A shard holds the answers of `--shard` prompts; what is on disk already is left out, so an interrupted run goes on where it was.
A third of the prompts is answered greedily, a third at T = 0.7, a third at T = 1, each with a seed of its own, so that every
answer is the function of logits, seed and position that decode workers compute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.engine.driver import Driver, Request, Run
from bench.engine.opening import PRECISIONS, open_runner
from common.engine.plan import Runner, StepPlan, StepResult
from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.errors import ConfigError
from common.protocol.messages import SamplingParams
from common.text.bundle import TextBundle, load_bundle
from recipes.draft.prompts import Prompt, Split, read
from recipes.draft.samples import Sample, shard_path, write_shard

TEMPERATURES = (0.0, 0.7, 1.0)
SPLITS: tuple[Split, ...] = ("held_out", "train")


class StoppingDriver(Driver):
    """A `Driver` whose requests end after an end-of-sequence id, at most two steps later than it was sampled."""

    def __init__(self, runner: Runner, eos_ids: Sequence[int], *, token_budget: int, max_rows: int) -> None:
        super().__init__(runner, token_budget=token_budget, max_rows=max_rows)
        self._eos_ids = frozenset(eos_ids)

    def _commit(self, plan: StepPlan, planned: list[Request], result: StepResult, run: Run) -> None:
        super()._commit(plan, planned, result, run)
        for request in planned:
            if request.output and request.output[-1] in self._eos_ids:
                # a step of it may be on its way already: one more is the last
                request.num_tokens = min(request.num_tokens, request.planned + 2 - len(request.prompt))


def answer(driver: Driver, eos_ids: Sequence[int], requests: Sequence[Request]) -> list[Sample]:
    """Run the requests and return prompts and answers, each up to and with its first end-of-sequence id.

    :raises ConfigError: if a prompt doesn't fit the engine's cache.
    """
    driver.generate(requests)
    samples: list[Sample] = []
    for request in requests:
        ends = [index for index, token in enumerate(request.output) if token in eos_ids]
        output = request.output[: ends[0] + 1] if ends else request.output
        tokens = np.array([*request.prompt, *output], np.uint32)
        samples.append(Sample(tokens, len(request.prompt), request.sampling.seed, request.sampling.temperature))
    return samples


def requests_of(
    prompts: Sequence[Prompt], bundle: TextBundle, *, first: int, max_prompt: int, max_tokens: int
) -> list[Request]:
    """Return a request for each prompt of at most `max_prompt` tokens. `first`: number of the first prompt, for seeds."""
    found: list[Request] = []
    for number, prompt in enumerate(prompts, first):
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        tokens = bundle.encode_chat(messages)
        if len(tokens) <= max_prompt:
            sampling = SamplingParams(seed=number, temperature=TEMPERATURES[number % len(TEMPERATURES)])
            found.append(Request(tokens, max_tokens, sampling))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.draft.generate", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds train.jsonl and held_out.jsonl; shards are written there")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--precision", default="auto", choices=sorted(PRECISIONS))
    parser.add_argument("--minutes", type=float, default=8.0, help="no shard is begun later (default: %(default)s)")
    parser.add_argument("--shard", type=int, default=2048, help="prompts of a shard (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=0, help="prompts of each split; 0: all")
    parser.add_argument("--max-prompt", type=int, default=512, help="longer prompts are left out (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=320, help="of an answer (default: %(default)s)")
    parser.add_argument("--max-running", type=int, default=512, help="answers in work at once (default: %(default)s)")
    parser.add_argument("--token-budget", type=int, default=4096, help="prompt tokens of a step (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if min(arguments.shard, arguments.max_tokens, arguments.max_running, arguments.token_budget) < 1:
        raise SystemExit("--shard, --max-tokens, --max-running and --token-budget must be at least 1")
    try:
        generate(arguments)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


def generate(arguments: argparse.Namespace) -> None:
    begun = time.monotonic()
    limit = arguments.limit or None
    waiting = {split: read(arguments.folder / f"{split}.jsonl")[:limit] for split in SPLITS}
    bundle = load_bundle(resolve(arguments.model))
    opening = open_runner(
        arguments.model,
        arguments.precision,
        max_running=arguments.max_running,
        token_budget=arguments.token_budget,
        max_model_len=arguments.max_prompt + arguments.max_tokens + 16,
    )
    driver = StoppingDriver(opening.runner, bundle.eos_ids, token_budget=arguments.token_budget, max_rows=arguments.max_running)
    for split in SPLITS:
        for number, first in enumerate(range(0, len(waiting[split]), arguments.shard)):
            path = shard_path(arguments.folder, split, number)
            if path.exists():
                continue
            if time.monotonic() - begun > 60 * arguments.minutes:
                print(f"stopped before {path.name}: {arguments.minutes} minutes are over")
                return
            prompts = waiting[split][first : first + arguments.shard]
            requests = requests_of(
                prompts, bundle, first=first, max_prompt=arguments.max_prompt, max_tokens=arguments.max_tokens
            )
            if not requests:
                continue
            at = time.monotonic()
            samples = answer(driver, bundle.eos_ids, requests)
            write_shard(path, samples)
            written = sum(len(sample.tokens) - sample.prompt_length for sample in samples)
            rate = written / (time.monotonic() - at)
            print(f"{path.name}: {len(samples)} answers, {written} tokens, {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
