"""What verification gives, and costs where it gives nothing: the decode scheduler and an engine, without a bus.

    python -m bench.engine.speculation --model dummy:llama-3.1-8b-counting --precision bf16 --rows 1,8,64 --accuracy 0.8,0.3
    python -m bench.engine.speculation --model dummy:tiny --precision fp32 --device cpu --rows 1,4 --output 32      a small run

Each row's text is generated without proposals first. Then it is generated again, with the recorded text as the proposal, each
token of which is replaced by a wrong one unless a draw for its position is below --accuracy. How it is proposed:

    off     nothing is: the time that all others are compared with
    empty   a drafter is asked on each step and has nothing: what speculation costs when it is idle
    chain   behind a step in flight what follows if everything is accepted, as the latest proposal of a drafter says
    table   behind a step in flight what follows its true outcome: a drafter whose table of outcomes always has it
    late    nothing behind a step in flight: what a drafter gives that is asked for each proposal, and waited for by nobody

All take turns, --turns times; medians. "of a step": tokens a row got from a step. "text": the part of the recorded text that
was generated again. It is all of it with a model that counts (`common/models/shapes.py`); other random weights give near ties
that kernels for one and for several tokens decide otherwise, after which a recorded text is worth nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench.common.machine import describe
from bench.common.table import markdown
from bench.engine.opening import PRECISIONS, open_runner
from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.engine.outcomes import Outcome, accept
from common.engine.plan import StepPlan
from common.engine.sequence import Sequence as Text
from common.engine.sequence_cache import SequenceCache
from common.protocol import tokens as token_bytes
from common.protocol.handles import WorkerRef
from common.protocol.messages import Generation, SamplingParams
from services.decode.scheduler import DecodeScheduler

MODES = ("off", "empty", "chain", "table", "late")


class Replay:
    """Proposes recorded texts, with wrong tokens among them. accuracy: share of right ones; depth: tokens of a proposal."""

    def __init__(self, texts: dict[str, list[int]], mode: str, accuracy: float, depth: int, vocab_size: int) -> None:
        self.texts = texts
        self.mode = mode
        self.depth = depth
        draws = random.Random(1)
        self.guesses = {
            name: [token if draws.random() < accuracy else (token + 1) % vocab_size for token in text]
            for name, text in texts.items()
        }

    def propose(self, text: Text, limit: int) -> list[int]:
        if self.mode == "empty":
            return []
        return self.guesses[text.request][text.num_outputs :][: min(limit, self.depth)]

    def foresee(self, text: Text, limit: int) -> list[Outcome]:
        if self.mode in ("empty", "late"):
            return []
        guesses, known = self.guesses[text.request], text.num_outputs
        accepted = len(text.verifying)
        coming = guesses
        if self.mode == "table":
            coming = self.texts[text.request]
            accepted = accept(text.verifying, coming[known:])
        place = known + accepted
        if place + 1 >= len(guesses):
            return []
        return [Outcome(accepted, coming[place], guesses[place + 1 :][: min(limit, self.depth)])]


class Found(NamedTuple):
    """seconds: from when all rows had a token until all had ended. steps: in that time. held: share of texts that was generated
    again until the first other token."""

    seconds: float
    tokens: int
    steps: int
    row_steps: int
    proposed: int
    accepted: int
    held: float


class Bench:
    def __init__(self, runner: Any, options: argparse.Namespace) -> None:
        self.runner = runner
        self.options = options

    def generate(self, rows: int, replay: Replay | None) -> tuple[Found, dict[str, list[int]]]:
        """Generate `rows` texts, planned and committed as a decode worker does it."""
        runner, options = self.runner, self.options
        pools = [PoolGroup(BlockPool(len(group.pool), runner.block_tokens), group.retention) for group in runner.groups]
        scheduler = DecodeScheduler(
            SequenceCache(GroupedPool(*pools), fingerprint=runner.fingerprint),
            token_budget=options.token_budget,
            max_running=max(rows, 1),
            max_context=runner.max_context,
        )
        if replay is not None:
            scheduler.propose, scheduler.foresee = replay.propose, replay.foresee
        texts = [self.text(index) for index in range(rows)]
        for text in texts:
            scheduler.admit(text)
        flights: deque[tuple[StepPlan, Any]] = deque()
        begun, tokens, steps, row_steps, proposed, accepted = 0.0, 0, 0, 0, 0, 0
        while True:
            if len(flights) < runner.run_ahead and (plan := scheduler.plan(0.0)) is not None:
                flights.append((plan, runner.submit(plan)))
                continue
            if not flights:
                break
            plan, step = flights.popleft()
            progress = scheduler.commit(plan, step.result(), 0.0)
            if begun:
                steps += 1
                row_steps += len(progress)
                tokens += sum(one.sequence.num_outputs - one.start for one in progress)
                proposed += sum(one.proposed for one in progress)
                accepted += sum(one.accepted for one in progress)
            elif all(text.num_outputs for text in texts):
                begun = time.perf_counter()
        seconds = time.perf_counter() - begun
        outputs = {text.request: text.output for text in texts}
        held = 1.0
        if replay is not None:
            same = [accept(replay.texts[name], output) for name, output in outputs.items()]
            held = sum(same) / sum(map(len, outputs.values()))
        return Found(seconds, tokens, steps, row_steps, proposed, accepted, held), outputs

    def text(self, index: int) -> Text:
        vocab_size = self.runner.vocab_size
        draws = random.Random(index)
        prompt = [draws.randrange(3, vocab_size) for _ in range(self.options.prompt)]
        generation = Generation(
            request=f"row {index}",
            attempt=0,
            gateway=WorkerRef("gateway", "bench", 1),
            tokens=token_bytes.pack(prompt),
            prompt_tokens=len(prompt),
            sampling=SamplingParams(temperature=self.options.temperature, max_tokens=self.options.output, seed=index),
            deadline_ms=1 << 60,
        )
        return Text.of(generation, vocab_size=vocab_size, max_context=self.runner.max_context)


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.speculation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:llama-3.1-8b", help="as penstock's --model")
    parser.add_argument("--precision", default="bf16", choices=list(PRECISIONS))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--rows", type=numbers(int), default=[1, 8, 64], help="texts at once; several between commas")
    parser.add_argument("--accuracy", type=numbers(float), default=[0.8, 0.3], help="share of right tokens; several too")
    parser.add_argument("--modes", type=numbers(str), default=list(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--depth", type=int, default=4, help="tokens of a proposal")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--token-budget", type=int, default=2048)
    options = parser.parse_args(argv)
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"no such mode: {', '.join(sorted(unknown))}")
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    max_rows = max(options.rows)
    settings = {"device": options.device, "max_running": max_rows, "token_budget": options.token_budget}
    settings["max_model_len"] = options.prompt + options.output + options.depth + 16
    opening = open_runner(options.model, options.precision, **settings)
    bench = Bench(opening.runner, options)
    lines: list[list[str]] = []
    for rows in options.rows:
        _, texts = bench.generate(rows, None)
        cases = [(mode, accuracy) for mode in options.modes for accuracy in options.accuracy]
        cases = [case for case in cases if case[0] not in ("off", "empty") or case[1] == options.accuracy[0]]
        found: dict[tuple[str, float], list[Found]] = {case: [] for case in cases}
        for _ in range(options.turns):
            for mode, accuracy in cases:
                replay = Replay(texts, mode, accuracy, options.depth, opening.runner.vocab_size)
                found[mode, accuracy].append(bench.generate(rows, None if mode == "off" else replay)[0])
        paces = {case: statistics.median(one.tokens / one.seconds for one in all_of) for case, all_of in found.items()}
        plain = next((pace for (mode, _), pace in paces.items() if mode == "off"), 0.0)
        for (mode, accuracy), pace in paces.items():
            one = found[mode, accuracy][-1]
            lines.append(
                [
                    str(rows),
                    mode,
                    "" if mode in ("off", "empty") else f"{accuracy}",
                    f"{pace:,.0f}",
                    f"{pace / plain:.2f}" if plain else "",
                    f"{one.tokens / max(1, one.row_steps):.2f}",
                    f"{one.accepted / one.proposed:.2f}" if one.proposed else "",
                    f"{1e3 * one.seconds / max(1, one.steps):.2f}",
                    f"{one.held:.0%}",
                ]
            )
            print("  " + " ".join(lines[-1]), file=sys.stderr, flush=True)
    titles = ["rows", "mode", "accuracy", "tok/s", "of off", "of a step", "accepted", "ms/step", "text"]
    print(f"# {describe()}\n\n{options.model}, {opening.precision} on {opening.device}\n\n{markdown(titles, lines)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
