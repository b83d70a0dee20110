"""What lookup would do to answers, without a machine's noise: `python -m bench.cpu.replay`.

    python -m bench.cpu.replay --answers FILE                keeps the answers there, or takes them from there
    python -m bench.cpu.replay --step-ms 10,11,13,16,22      other times of a step with 1, 2, 3, 5 and 9 tokens

A `penstock up` answers held-out prompts and those of `bench.cpu.chat`, greedily and at temperature 1. Then the drafter and the
policy run over these answers as in a decode worker, token for token, with steps that take the given times. Ratios are to the
time without proposals. Each answer has a worker of its own, `fresh`, or one has all in turn. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import random
from itertools import pairwise
from pathlib import Path
from statistics import median

import anyio
import httpx
import msgspec
import numpy as np

from bench.cpu import chat
from bench.cpu.up import model_of, penstock_up
from common.engine.outcomes import accept
from common.engine.sequence import Sequence
from common.models.source import DEFAULT_MODEL, resolve
from common.protocol import tokens as token_bytes
from common.protocol.handles import WorkerRef
from common.protocol.messages import Generation, SamplingParams
from common.text.tokenizer import Tokenizer, load_tokenizer
from recipes.draft.prompts import prompts
from services.decode.lookup import Lookup
from services.decode.proposers import Proposers
from services.decode.scheduler import Progress
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from services.decode.step_costs import SIZES

SIZES_GIVEN = (1, 2, 3, 5, 9)
MIN_TOKENS = 60
CONTEXT = 1 << 16


class Answer(msgspec.Struct):
    """`kind`: a name for the set of prompts, with the temperature."""

    kind: str
    prompt: str
    text: str


async def collect(url: str, num_prompts: int) -> list[Answer]:
    sets = {name: [[{"role": "user", "content": prompt}] for prompt in chosen] for name, chosen in chat.SETS.items()}
    sets["held-out"] = [msgspec.to_builtins(prompt.messages) for prompt in prompts("held_out", num_prompts, 3)]
    found: list[Answer] = []
    limiter = anyio.CapacityLimiter(8)
    async with httpx.AsyncClient(base_url=url, timeout=600) as http, anyio.create_task_group() as clients:
        name = await model_of(http)

        async def ask(kind: str, messages: list[dict[str, str]], temperature: float) -> None:
            body = {"model": name, "messages": messages, "max_tokens": 256, "temperature": temperature, "seed": 1}
            async with limiter:
                answer = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
            turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages]
            prompt = "".join([*turns, "<|im_start|>assistant\n"])
            found.append(Answer(f"{kind}, T = {temperature:.0f}", prompt, answer["choices"][0]["message"]["content"]))

        for kind, conversations in sets.items():
            for messages in conversations:
                for temperature in (0.0, 1.0):
                    clients.start_soon(ask, kind, messages, temperature)
    return found


def new_worker(max_tokens: int) -> Proposers:
    policy = SpeculationPolicy(max_tokens=max_tokens, max_step_tokens=256)
    return Proposers(DraftBook(policy, vocab_size=1 << 20), [Lookup(max_tokens=8192, max_recent_tokens=0)])


def ratio(worker: Proposers, prompt: list[int], output: list[int], step_ms: list[float], dice: random.Random) -> float:
    """Return how many times as fast an answer comes."""
    generation = Generation(
        request="replayed",
        attempt=0,
        gateway=WorkerRef("gateway", "gateway-1", 1),
        tokens=token_bytes.pack(prompt),
        prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=CONTEXT),
        deadline_ms=1 << 60,
    )
    sequence = Sequence.of(generation, vocab_size=1 << 20, max_context=CONTEXT)
    worker.open(sequence)
    worker.tidy()
    given, took = 0, 0.0
    while given < len(output):
        worker.begin_step([sequence])
        proposal = worker.propose(sequence, len(output) - given - 1)
        accepted = accept(proposal, output[given:])
        sequence.tokens += output[given : given + accepted + 1]
        given += accepted + 1
        size = next(size for size in SIZES if size > len(proposal))
        took += (step := float(np.interp(size, SIZES_GIVEN, step_ms)))
        worker.record(Progress(sequence, 0, len(proposal), accepted))
        worker.policy.costs.observe(1 + len(proposal), step * dice.lognormvariate(0, 0.15))
    worker.close(sequence)
    return len(output) * step_ms[0] / took


def rows_of(answers: list[Answer], tokenizer: Tokenizer, step_ms: list[float], max_tokens: int) -> list[str]:
    found: dict[tuple[str, str], list[float]] = {}
    for start in ("fresh", "in turn"):
        dice, worker = random.Random(1), new_worker(max_tokens)
        for answer in answers:
            output = tokenizer.encode(answer.text)
            if len(output) < MIN_TOKENS:
                continue
            worker = new_worker(max_tokens) if start == "fresh" else worker
            prompt = tokenizer.encode(answer.prompt, parse_special=True)
            found.setdefault((answer.kind, start), []).append(ratio(worker, prompt, output, step_ms, dice))
    return [
        f"| {kind} | {start} | {len(ratios)} | {median(ratios):.2f} | {min(ratios):.3f} |"
        for (kind, start), ratios in sorted(found.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--prompts", type=int, default=50, help="held-out ones")
    parser.add_argument("--step-ms", default="4.95,5.2,5.5,6.7,9.5", help=f"of steps of {SIZES_GIVEN} tokens")
    parser.add_argument("--speculation-tokens", type=int, default=4)
    options = parser.parse_args()
    step_ms = [float(step) for step in options.step_ms.split(",")]
    if len(step_ms) != len(SIZES_GIVEN) or any(after < before for before, after in pairwise(step_ms)):
        raise SystemExit(f"--step-ms: {len(SIZES_GIVEN)} times, none less than the one before")
    if options.answers is not None and options.answers.exists():
        answers = msgspec.json.decode(options.answers.read_bytes(), type=list[Answer])
    else:
        with penstock_up(["--lookup=off", "--head=off"]) as url:
            answers = anyio.run(collect, url, options.prompts)
        if options.answers is not None:
            options.answers.write_bytes(msgspec.json.encode(answers))
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL))
    print("| answers | worker | number | median | worst |\n|---|---|---|---|---|")
    print("\n".join(rows_of(answers, tokenizer, step_ms, options.speculation_tokens)))


if __name__ == "__main__":
    main()
