"""Speculation changes no token: the same requests with it and without, through the whole stack.

    python -m bench.exactness                                   500 prompts, greedy and two ways of sampling: hours on two cores
    python -m bench.exactness --prompts 40 --only lookup,garbage
    python -m bench.exactness --model dummy:llama-3.1-8b --draft-model dummy:llama-3.1-8b-2-layers --clients 64 \\
        -- --device=cuda --dtype=bfloat16 --batch-invariant

What stands behind `--` is given to every `penstock up`. On a GPU, answers are independent of their batch with --batch-invariant
only; `off again`, the baseline a second time, tells whether they are. A head is measured where --head names one (a folder, or
auto, on CPUs).

One `penstock up` after the other answers the same prompts, --clients at a time: without speculation, twice, then with lookup, a
head where one is given, n-grams of draft workers, a draft model (the model itself if none is named), draft workers that propose
garbage, draft workers that are killed and stopped at random, and ones whose way to the bus loses and delays messages, parts and
is cut (`bench/common/relay.py`). Whatever is proposed is verified (`--verify always`). An answer is equal if its text, its
number of tokens and the reason of its end are. Ends with status 1 if one is not, or if a kind of draft worker had nothing
verified, such as a draft model that is as slow as the model.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import anyio
import httpx

from bench.common.disturbances import Disturbances
from bench.common.draft_workers import draft_worker, draft_workers_ready, running
from bench.common.machine import describe
from bench.common.relay import Counts, Faults, relayed
from bench.common.stack import free_ports
from bench.common.table import markdown
from bench.cpu.up import model_of, penstock_up

TASKS = (
    "Explain {} to a child.",
    "Write three sentences about {}.",
    "List five facts about {}.",
    "What is the history of {}?",
    "Write a short poem about {}.",
    "Why do people care about {}?",
    "Give a recipe or a plan that has to do with {}.",
    "Compare {} with something that it is often confused with.",
    "Write a dialogue of two friends about {}.",
    "Repeat this line four times: we talk about {} today.",
    "Write a Python function that prints something about {}.",
    "Answer with a JSON object that describes {}.",
    "What questions would you ask an expert on {}?",
    "Summarise what everybody should know of {}.",
    "Translate into French: I like {}.",
    "Write a headline and a first paragraph about {}.",
    "Describe a day without {}.",
    "Name advantages and drawbacks of {}.",
    "Tell a joke about {}.",
    "Write a letter that complains about {}.",
)
TOPICS = (
    *("bicycles", "the moon", "bread", "glaciers", "chess", "honey bees", "railways", "the violin", "coral reefs", "clocks"),
    *("volcanoes", "tea", "libraries", "kites", "lighthouses", "maps", "soap", "owls", "rivers", "paper"),
    *("umbrellas", "salt", "bridges", "dreams", "whales"),
)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "T = 0.7": {"temperature": 0.7, "top_p": 0.9},
    "T = 1.0": {"temperature": 1.0, "top_p": 0.9},
}


class Arrangement(NamedTuple):
    """flags: of `penstock up`. garbage: draft workers that propose garbage. is_disturbed: draft workers die and stop.
    relayed: further draft workers, which reach the bus through a relay with FAULTS each."""

    flags: str
    garbage: int = 0
    is_disturbed: bool = False
    relayed: int = 0


FAULTS = Faults(drop=0.03, delay=0.03, max_delay_s=0.15, open_s=(0.5, 4.0), closed_s=(0.05, 3.0), cut=0.4)
"""Silences up to three seconds: longer than it takes to believe that a worker is dead."""
BASELINE, AGAIN = "off", "off again"
OFF = "--draft 0 --lookup off --head off"
ARRANGEMENTS = {
    BASELINE: Arrangement(OFF),
    AGAIN: Arrangement(OFF),
    "lookup": Arrangement("--draft 0 --lookup on --head off --verify always"),
    "head": Arrangement("--draft 0 --lookup off --head {head} --verify always"),
    "n-grams": Arrangement("--draft 2 --lookup off --head off --verify always"),
    "draft model": Arrangement(
        "--draft 1 --draft-model {draft_model} --draft-branches 6 --lookup off --head off --verify always"
    ),
    "garbage": Arrangement("--draft 0 --lookup off --head off --verify always", garbage=2),
    "killed and stopped": Arrangement("--draft 2 --lookup off --head off --verify always", is_disturbed=True),
    "partitioned": Arrangement("--draft 0 --lookup off --head off --verify always", relayed=2),
}

Answer = tuple[str, str, int]
"""Text, reason of its end, tokens."""


class Outcome(NamedTuple):
    answers: dict[tuple[str, int], Answer]
    seconds: float
    proposed: float
    accepted: float
    disturbances: str


def prompts(count: int) -> list[str]:
    """The first `count` of all tasks about all topics, in an order that mixes them."""
    every = [task.format(topic) for topic in TOPICS for task in TASKS]
    random.Random(7).shuffle(every)
    return every[:count]


async def ask_all(url: str, options: argparse.Namespace) -> dict[tuple[str, int], Answer]:
    found: dict[tuple[str, int], Answer] = {}
    asked = [(way, index, prompt) for way in SAMPLING for index, prompt in enumerate(prompts(options.prompts))]
    limiter = anyio.CapacityLimiter(options.clients)
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        model = await model_of(http)

        async def ask(way: str, index: int, prompt: str) -> None:
            body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": options.tokens}
            async with limiter:
                answer = (
                    await http.post("/v1/chat/completions", json=body | SAMPLING[way] | {"seed": index})
                ).raise_for_status()
            said = answer.json()
            choice = said["choices"][0]
            found[way, index] = choice["message"]["content"], choice["finish_reason"], said["usage"]["completion_tokens"]

        async with anyio.create_task_group() as group:
            for each in asked:
                group.start_soon(ask, *each)
    return found


def measure(arrangement: Arrangement, options: argparse.Namespace) -> Outcome:
    (nats_port,) = free_ports(1)
    flags = arrangement.flags.format(draft_model=options.draft_model or options.model, head=options.head).split()
    flags += [f"--nats-port={nats_port}", "--dtype=float32", f"--model={options.model}", *options.flags]
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(penstock_up(flags))
        stack.enter_context(garbage_workers(arrangement.garbage, nats_port, options.model))
        relays = [stack.enter_context(relayed(nats_port, FAULTS, seed=11 + rank)) for rank in range(arrangement.relayed)]
        for rank, relay in enumerate(relays):
            command = draft_worker("services.draft", nats_port, options.model, f"relayed-{rank}", at_port=relay.port)
            stack.enter_context(running(command))
        anyio.run(draft_workers_ready, nats_port, len(relays) + arrangement.garbage + flag_value(flags, "--draft"))
        disturbances = Disturbances(nats_port)
        begun = time.monotonic()
        with disturbances.going_on() if arrangement.is_disturbed else contextlib.nullcontext():
            answers = anyio.run(ask_all, url, options)
        seconds = time.monotonic() - begun
        proposed, accepted = speculated(url)
        disturbed = str(disturbances.count) if arrangement.is_disturbed else said([relay.counts for relay in relays])
    return Outcome(answers, seconds, proposed, accepted, disturbed)


def flag_value(flags: Sequence[str], name: str) -> int:
    return int(flags[flags.index(name) + 1])


def said(counts: Sequence[Counts]) -> str:
    """What relays did, in words; a dash without any."""
    if not counts:
        return "–"
    dropped, delayed, partitions, cuts = (sum(column) for column in zip(*(one[1:] for one in counts), strict=True))
    return f"{dropped:,} lost, {delayed:,} late, {partitions} partitions, {cuts} cuts"


def speculated(url: str) -> tuple[float, float]:
    """Tokens that decode workers verified and accepted, by their metrics."""
    totals = {"penstock_speculation_draft_tokens_total": 0.0, "penstock_speculation_accepted_tokens_total": 0.0}
    for group in httpx.get(f"{url}/sd").raise_for_status().json():
        if group["labels"]["role"] == "decode":
            for line in httpx.get(f"http://{group['targets'][0]}/metrics").raise_for_status().text.splitlines():
                name = line.partition("{")[0]
                if name in totals:
                    totals[name] += float(line.rpartition(" ")[2])
    proposed, accepted = totals.values()
    return proposed, accepted


@contextlib.contextmanager
def garbage_workers(count: int, nats_port: int, model: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for rank in range(count):
            stack.enter_context(running(draft_worker("bench.exactness.garbage", nats_port, model, f"garbage-{rank}")))
        yield


def row_of(name: str, outcome: Outcome, expected: Outcome) -> list[str]:
    columns = [name]
    for way in SAMPLING:
        keys = [key for key in expected.answers if key[0] == way]
        equal = sum(outcome.answers[key] == expected.answers[key] for key in keys)
        columns.append(f"{equal} of {len(keys)}")
    tokens = sum(answer[2] for answer in outcome.answers.values())
    share = f"{outcome.accepted / outcome.proposed:.0%} of {outcome.proposed:,.0f}" if outcome.proposed else "–"
    return [*columns, share, outcome.disturbances, f"{tokens:,}", f"{outcome.seconds:.0f}"]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.exactness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=len(TASKS) * len(TOPICS))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--only", default="", help=f"some of {', '.join(ARRANGEMENTS)}; between commas")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--draft-model", default="", help="for the arrangement `draft model`; by default --model itself")
    parser.add_argument("--head", default="", help="a folder or auto, for the arrangement `head`; without it that is left out")
    parser.add_argument("flags", nargs="*", help="of every `penstock up`, behind --")
    options = parser.parse_args(argv)
    chosen = [name for name in ARRANGEMENTS if name == BASELINE or not options.only or name in options.only.split(",")]
    chosen = [name for name in chosen if name != "head" or options.head]
    outcomes: dict[str, Outcome] = {}
    rows: list[list[str]] = []
    differ = 0
    for name in chosen:
        outcome = outcomes[name] = measure(ARRANGEMENTS[name], options)
        rows.append(row_of(name, outcome, outcomes[BASELINE]))
        print(rows[-1], file=sys.stderr, flush=True)
        for key, answer in outcome.answers.items():
            if answer != outcomes[BASELINE].answers[key]:
                differ += 1
                print(f"{name}, {key}:\n  {outcomes[BASELINE].answers[key]}\n  {answer}", file=sys.stderr)
        if name not in (BASELINE, AGAIN) and not outcome.proposed:
            differ += 1
            print(f"{name}: nothing was verified, so this says nothing", file=sys.stderr)
    print(f"{describe()}\n")
    print(markdown(["", *SAMPLING, "accepted", "disturbances", "tokens", "s"], rows))
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
