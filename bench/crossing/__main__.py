"""Every kind of request, in every arrangement of workers: the answers are the same.

    python -m bench.crossing                                              100 random requests, in all arrangements
    python -m bench.crossing --model ./a-model --requests 300 --first 7000 --only "one of each,disturbed"
    python -m bench.crossing --model ./a-model -- --device=cuda --dtype=bfloat16 --batch-invariant

What stands behind `--` is given to every `penstock up`. On a GPU, answers are independent of their batch with --batch-invariant
only.

Chats, completions, Responses and Messages, whole or streamed, greedy or sampled with a seed, with penalties, biases, stops,
schemas, tools, several choices, log-probabilities and predictions, with short and long prompts, of clients that now and then go
away: a request is made from its number, so a failure can be asked again (--first N --requests 1). One `penstock up` after the
other answers them, --clients at a time. Compared are texts, calls of tools and reasons of ends with those of one decode worker
that speculates nothing and keeps no KV. Ends with status 1 if one differs, or if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from bench.common.disturbances import Disturbances
from bench.common.machine import describe
from bench.common.stack import free_ports
from bench.common.table import markdown
from bench.cpu.up import model_of, penstock_up
from bench.crossing.answers import FAILED, LEFT, ask
from bench.crossing.requests import Asked, drawn


class Arrangement(NamedTuple):
    """flags: of `penstock up`. disturbed: roles whose workers are killed and stopped at random."""

    flags: str
    disturbed: tuple[str, ...] = ()


ALONE = "alone"
ARRANGEMENTS = {
    ALONE: Arrangement("--prefill 0 --decode 1 --kvstore 0 --speculation-tokens 0"),
    "one of each": Arrangement("--prefill 1 --decode 1 --kvstore 1 --verify always"),
    "pools": Arrangement("--prefill 2 --decode 2 --draft 1 --kvstore 1 --token-budget 70 --verify always"),
    "draft model": Arrangement("--prefill 1 --decode 2 --draft 1 --draft-model {draft_model} --verify always"),
    "disturbed": Arrangement(
        "--prefill 2 --decode 2 --draft 1 --draft-model {draft_model} --kvstore 1 --token-budget 200 --verify always"
        " --max-losses 20 --max-attempts 20",
        disturbed=("prefill", "decode", "draft", "kvstore"),
    ),
}
_SHOWN = 3


class Outcome(NamedTuple):
    """answers: of each request in turn, which are asked again and again where workers die."""

    answers: list[tuple[int, str]]
    seconds: float
    disturbances: str


def measure(arrangement: Arrangement, requests: dict[int, Asked], options: argparse.Namespace) -> Outcome:
    (port,) = free_ports(1)
    flags = arrangement.flags.format(draft_model=options.draft_model or options.model).split()
    disturbances = Disturbances(port, arrangement.disturbed)
    going_on = disturbances.going_on() if arrangement.disturbed else contextlib.nullcontext()
    with penstock_up([f"--model={options.model}", f"--nats-port={port}", *flags, *options.flags]) as url:
        begun = time.perf_counter()
        with going_on:
            answers = asyncio.run(_ask_all(url, requests, options.clients))
            while arrangement.disturbed and time.perf_counter() - begun < options.disturbed_s:
                answers += asyncio.run(_ask_all(url, requests, options.clients))
    told = ", ".join(f"{kind} {count}" for kind, count in sorted(disturbances.kinds.items()))
    return Outcome(answers, time.perf_counter() - begun, told or "–")


async def _ask_all(url: str, requests: dict[int, Asked], clients: int) -> list[tuple[int, str]]:
    answers: list[tuple[int, str]] = []
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        model, turn = await model_of(http), asyncio.Semaphore(clients)

        async def one(number: int, asked: Asked) -> None:
            async with turn:
                answers.append((number, await ask(http, asked, model)))

        await asyncio.gather(*(one(number, asked) for number, asked in requests.items()))
    return answers


def compare(name: str, outcome: Outcome, expected: Outcome, requests: dict[int, Asked]) -> tuple[int, int]:
    """Say how answers differ; return how many do, and how many requests failed."""
    meant = dict(expected.answers)
    failed = [(number, answer) for number, answer in outcome.answers if answer.startswith(FAILED)]
    others = [(number, answer) for number, answer in outcome.answers if not answer.startswith(FAILED)]
    differ = [(number, answer) for number, answer in others if LEFT not in (answer, meant[number]) and answer != meant[number]]
    for number, answer in [*failed, *differ][:_SHOWN]:
        print(f"{name}, {number}: {requests[number]}\n  {meant[number][:400]}\n  {answer[:400]}", file=sys.stderr)
    return len(differ), len(failed)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.crossing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--disturbed-s", type=float, default=20.0, help="so long all are asked again where workers die")
    parser.add_argument("--only", default="", help=f"some of {', '.join(ARRANGEMENTS)}; between commas")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--draft-model", default="", help="by default --model itself")
    parser.add_argument("flags", nargs="*", help="of every `penstock up`, behind --")
    options = parser.parse_args(argv)
    chosen = [name for name in ARRANGEMENTS if name == ALONE or not options.only or name in options.only.split(",")]
    requests = {number: drawn(number) for number in range(options.first, options.first + options.requests)}
    rows: list[list[str]] = []
    expected: Outcome | None = None
    wrong = 0
    for name in chosen:
        outcome = measure(ARRANGEMENTS[name], requests, options)
        expected = expected or outcome
        differ, failed = compare(name, outcome, expected, requests)
        wrong += differ + failed
        left = sum(answer == LEFT for _, answer in outcome.answers)
        counts = map(str, (len(outcome.answers), differ, failed, left))
        rows.append([name, *counts, outcome.disturbances, f"{outcome.seconds:.0f}"])
        print(rows[-1], file=sys.stderr, flush=True)
    print(f"{describe()}\n\n{options.model} {' '.join(options.flags)}\n")
    print(markdown(["", "answers", "differ", "failed", "left", "disturbances", "s"], rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
