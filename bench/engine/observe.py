"""What one engine answers, for `accuracy.py` to compare: greedily, how likely it finds real text, alone and in batches.

A process per engine: `python -m bench.engine.observe REQUEST` prints one JSON object (`Observed`); REQUEST is a `Wanted`.

Text is *forced*: each step's token is the text's next one, by a bias that no logit outweighs; log-probabilities are those of
the untouched logits. So every position goes through the path that decoding takes, KV included, and not through the prompt's.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.common.machine import ROOT
from bench.common.request import request
from bench.engine.driver import Driver, Request
from bench.engine.opening import open_runner
from bench.engine.texts import DOCUMENTS, real_text
from common.cache.block_table import BlockTable
from common.engine.plan import Runner, StepPlan, StepRow
from common.models.source import resolve
from common.protocol.messages import SamplingParams
from common.runtime import parent_death
from common.text.tokenizer import load_tokenizer

FORCE = 500.0


class Wanted(msgspec.Struct, kw_only=True):
    """`prompts` x `tokens`: greedy continuations of pieces of text. `rows` x `row_tokens`: forced text, each after `row_prompt`
    tokens.

    `subjects`: requests that are answered alone and among others; 0: not looked at.
    """

    model: str
    precision: str
    device: str = "auto"
    settings: dict[str, Any] = {}
    prompts: int = 64
    tokens: int = 64
    rows: int = 32
    row_prompt: int = 32
    row_tokens: int = 512
    subjects: int = 0
    company: tuple[int, ...] = (1, 6, 40)


class Scored(msgspec.Struct, array_like=True):
    """A token of the text: its log-probability, and the likeliest token there."""

    logprob: float
    top: int


class Compared(msgspec.Struct, kw_only=True):
    """One request alone and among `others`: whether every token and every bit of its log-probabilities was the same."""

    prompt: int
    others: int
    same_tokens: bool
    same_bits: bool
    first_difference: int = -1
    largest_error: float = 0.0


class Observed(msgspec.Struct, kw_only=True):
    """fp8_share: of the linears' weights that are FP8 (see `engine.load.fp8_choice`)."""

    precision: str
    device: str
    greedy: list[list[int]] = []
    forced: list[list[Scored]] = []
    compared: list[Compared] = []
    text_tokens: int = 0
    fp8_share: float = 0.0
    seconds: float = 0.0


def text_tokens(model: str, wanted: int) -> list[int]:
    """Tokens of real text that is on the machine: the project's documents, then Python's own, as often as need be."""
    tokenizer = load_tokenizer(resolve(model))
    tokens: list[int] = []
    files = [ROOT / name for name in DOCUMENTS] + sorted(Path(os.__file__).parent.glob("[a-z]*.py"))
    for file in files:
        if file.is_file() and len(tokens) < wanted:
            tokens += tokenizer.encode(file.read_text(errors="ignore")[:200_000])
    return (tokens * (wanted // max(1, len(tokens)) + 1))[:wanted]


def pieces(tokens: Sequence[int], count: int, low: int, high: int, seed: int) -> list[list[int]]:
    """`count` pieces of `low` to `high` tokens, from anywhere."""
    draw = random.Random(seed)
    lengths = [draw.randint(low, high) for _ in range(count)]
    starts = [draw.randrange(max(1, len(tokens) - length)) for length in lengths]
    return [list(tokens[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def force(runner: Runner, rows: Sequence[Sequence[int]], prompt: int) -> list[list[Scored]]:
    """rows: equally long. Scores tokens [prompt, …) of each, one step per position, all rows together."""
    size = runner.block_tokens
    per_row = -(-len(rows[0]) // size)
    free = list(range(runner.num_blocks))
    random.Random(1).shuffle(free)
    blocks = [BlockTable(free[index * per_row : (index + 1) * per_row]) for index in range(len(rows))]
    scored: list[list[Scored]] = [[] for _ in rows]
    start = 0
    for end in range(prompt, len(rows[0])):
        plan_rows = [
            StepRow(
                tokens=list(row[start:end]),
                start=start,
                blocks=blocks[index],
                num_samples=1,
                sampling=SamplingParams(temperature=0.0, logprobs=1, logit_bias={row[end]: FORCE}),
                prompt_tokens=prompt,
            )
            for index, row in enumerate(rows)
        ]
        samples = runner.execute(StepPlan(step=end, rows=plan_rows)).rows
        for index, sample in enumerate(samples):
            assert sample.logprobs is not None and sample.tokens == [rows[index][end]]
            found = sample.logprobs[0]
            scored[index].append(Scored(found.logprob, found.top_tokens[0]))
        start = end
    return scored


def compare(runner: Runner, tokens: Sequence[int], wanted: Wanted, token_budget: int) -> list[Compared]:
    sampling = SamplingParams(temperature=0.0, logprobs=0)
    found = []
    for subject in pieces(tokens, wanted.subjects, 3, 200, seed=5):

        def answered(others: int, subject: list[int] = subject) -> Request:
            request = Request(subject, wanted.tokens, sampling)
            company = [Request(piece, 1 + len(piece) % 40) for piece in pieces(tokens, others, 1, 300, seed=others)]
            # neither first nor last, and with others that end before and after it
            batch = [*company[: others // 2], request, *company[others // 2 :]]
            Driver(runner, token_budget=token_budget, max_rows=len(batch)).generate(batch)
            return request

        alone = answered(0)
        for others in wanted.company:
            among = answered(others)
            errors = [abs(a.logprob - b.logprob) for a, b in zip(alone.logprobs, among.logprobs, strict=True)]
            different = [index for index, error in enumerate(errors) if error or alone.output[index] != among.output[index]]
            found.append(
                Compared(
                    prompt=len(subject),
                    others=others,
                    same_tokens=alone.output == among.output,
                    same_bits=not different,
                    first_difference=different[0] if different else -1,
                    largest_error=max(errors, default=0.0),
                )
            )
    return found


def observe(wanted: Wanted) -> Observed:
    """:raises PenstockError: if the engine does not open."""
    begun = time.perf_counter()
    max_rows = max(wanted.prompts, wanted.rows, *(n + 1 for n in wanted.company), 1)
    token_budget = 2048
    settings = {"device": wanted.device, "max_running": max_rows, "token_budget": token_budget, "kv_cache_mb": 4096}
    opening = open_runner(wanted.model, wanted.precision, **(settings | wanted.settings))
    runner: Runner = opening.runner
    tokens = text_tokens(wanted.model, 40_000)
    observed = Observed(precision=opening.precision.name, device=opening.device, text_tokens=len(tokens))
    if wanted.prompts:
        requests = [Request(piece, wanted.tokens) for piece in pieces(tokens, wanted.prompts, 5, 120, seed=3)]
        Driver(runner, token_budget=token_budget, max_rows=max_rows).generate(requests)
        observed.greedy = [request.output for request in requests]
    if wanted.rows:
        length = wanted.row_prompt + wanted.row_tokens
        observed.forced = force(
            runner, real_text(load_tokenizer(resolve(wanted.model)), wanted.rows, length), wanted.row_prompt
        )
    if wanted.subjects:
        observed.compared = compare(runner, tokens, wanted, token_budget)
    if decoder := getattr(runner, "decoder", None):
        sizes = [(weight.format, weight.parameters) for role, weight in decoder.linears if role != "head"]
        observed.fp8_share = sum(size for kind, size in sizes if kind == "fp8") / sum(size for _, size in sizes)
    observed.seconds = time.perf_counter() - begun
    return observed


if __name__ == "__main__":
    parent_death.guard()
    _, wanted = request(Wanted, "bench.engine.observe", __doc__)
    results = os.fdopen(os.dup(1), "wb")  # the result alone goes to stdout, whatever libraries print
    os.dup2(2, 1)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the services do, before torch is imported
    results.write(msgspec.json.encode(observe(wanted)) + b"\n")
    results.close()
