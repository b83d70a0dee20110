"""What lookup gives on a GPU, and what it costs where it finds nothing: the decode scheduler and an engine, without a bus.

    python -m bench.engine.lookup --model dummy:llama-3.1-8b-counting --precision bf16
    python -m bench.engine.lookup --copying 1,8 --idle "" --modes off,device --output 512

Texts are those of a model that counts (`common/models/shapes.py`), so none depends on rounding. --copying: rows whose prompts
have their answers in them, in pieces of --piece tokens, shuffled, with two other tokens before each. --idle: rows whose answers
have nothing that came before. How they are generated:

    off      without proposals: the pace that the others are compared with
    host     lookup in the decode process (`services/decode/lookup.py`), two searches a row and step
    device   lookup in the engine's steps (`common/engine/gpu/lookup.py`)

What is verified is up to the policy of a decode worker, which measures steps as it does there. All modes take turns, --turns
times, after one that does not count; medians. "of a step": tokens a row got from a step. "accepted": of the proposed tokens.
"host µs": planning and committing a step, which a GPU hides as long as it takes less than a step. Needs a GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bench.common.machine import describe
from bench.common.table import markdown
from bench.engine.opening import PRECISIONS, open_runner
from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.engine.plan import StepPlan
from common.engine.sequence import Sequence as Text
from common.engine.sequence_cache import SequenceCache
from common.protocol import tokens as token_bytes
from common.protocol.handles import WorkerRef
from common.protocol.messages import Generation, SamplingParams
from services.decode.device_lookup import DeviceLookup
from services.decode.lookup import Lookup
from services.decode.proposers import Proposers
from services.decode.scheduler import DecodeScheduler
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy

MODES = ("off", "host", "device")


class Case(NamedTuple):
    """rows: texts at once. piece: tokens of an answer that stand together in its prompt; 0: none are there."""

    rows: int
    piece: int
    prompt: int
    output: int


class Found(NamedTuple):
    """seconds: from when all rows had a token until all had ended; host_s: of that, for planning and committing. tokens, steps,
    row_steps, proposed, accepted: in that time."""

    seconds: float
    host_s: float
    tokens: int
    steps: int
    row_steps: int
    proposed: int
    accepted: int


def text_of(case: Case, index: int, *, vocab_size: int, max_context: int) -> Text:
    """Return a text that counts on from the end of its prompt."""
    draws, filler = random.Random(index), min(1000, vocab_size // 4)
    begin = filler + index * (case.output + 1) % max(1, vocab_size - filler - case.output - 2)
    pieces = [list(range(at, min(at + case.piece, begin + case.output + 1))) for at in _begins(case, begin)]
    draws.shuffle(pieces)
    copied = [token for piece in pieces for token in (draws.randrange(3, filler), draws.randrange(3, filler), *piece)]
    copied = copied[: case.prompt - 1]
    prompt = [*(draws.randrange(3, filler) for _ in range(case.prompt - 1 - len(copied))), *copied, begin]
    generation = Generation(
        request=f"row {index}",
        attempt=0,
        gateway=WorkerRef("gateway", "bench", 1),
        tokens=token_bytes.pack(prompt),
        prompt_tokens=len(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=case.output),
        deadline_ms=1 << 60,
    )
    return Text.of(generation, vocab_size=vocab_size, max_context=max_context)


def _begins(case: Case, begin: int) -> range:
    return range(begin + 1, begin + case.output + 1, case.piece) if case.piece else range(0)


def proposers_of(mode: str, depth: int) -> Proposers | None:
    """As a decode worker makes them; None for `off`. They keep what they have measured from turn to turn."""
    if mode == "off":
        return None
    policy = SpeculationPolicy(max_tokens=depth, max_step_tokens=256)
    book = DraftBook(policy, vocab_size=1 << 20)
    if mode == "host":
        return Proposers(book, [Lookup(max_tokens=4096, max_recent_tokens=0)])
    return Proposers(book, on_device=DeviceLookup(policy))


def generate(runner: Any, case: Case, proposers: Proposers | None, token_budget: int) -> tuple[Found, list[list[int]]]:
    """Generate a case's texts, planned and committed as a decode worker does it. Return the answers, too."""
    pools = [PoolGroup(BlockPool(len(group.pool), runner.block_tokens), group.retention) for group in runner.groups]
    scheduler = DecodeScheduler(
        SequenceCache(GroupedPool(*pools), fingerprint=runner.fingerprint),
        token_budget=token_budget,
        max_running=case.rows,
        max_context=runner.max_context,
    )
    texts = [text_of(case, i, vocab_size=runner.vocab_size, max_context=runner.max_context) for i in range(case.rows)]
    if proposers is not None:
        scheduler.propose, scheduler.foresee = proposers.propose, proposers.foresee
        scheduler.room_for, scheduler.begin_step, scheduler.wanted = proposers.room_for, proposers.begin_step, proposers.wanted
    for text in texts:
        scheduler.admit(text)
        if proposers is not None:
            proposers.open(text)
    flights: deque[tuple[StepPlan, Any]] = deque()
    begun = host_s = 0.0
    tokens = steps = row_steps = proposed = accepted = 0
    ended = time.perf_counter()
    while True:
        planning = time.perf_counter()
        plan = scheduler.plan(0.0) if len(flights) < runner.run_ahead else None
        host_s += time.perf_counter() - planning
        if plan is not None:
            flights.append((plan, runner.submit(plan)))
            if proposers is not None:
                proposers.tidy()
            continue
        if not flights:
            break
        plan, step = flights.popleft()
        result = step.result()
        elapsed_s, ended = time.perf_counter() - ended, time.perf_counter()
        progress = scheduler.commit(plan, result, 0.0)
        if proposers is not None:
            proposers.measure(plan, elapsed_s, result.passes)
            for one in progress:
                proposers.record(one)
        host_s += time.perf_counter() - ended
        if begun:
            steps += 1
            row_steps += len(progress)
            tokens += sum(one.sequence.num_outputs - one.start for one in progress)
            proposed += sum(one.proposed for one in progress)
            accepted += sum(one.accepted for one in progress)
        elif all(text.num_outputs for text in texts):
            begun, host_s = time.perf_counter(), 0.0
    seconds = time.perf_counter() - begun
    if proposers is not None:
        for text in texts:
            proposers.close(text)
    return Found(seconds, host_s, tokens, steps, row_steps, proposed, accepted), [text.output for text in texts]


def lines_of(case: Case, found: dict[str, list[Found]], held: dict[str, bool]) -> list[list[str]]:
    """Return a line for each mode."""
    paces = {mode: statistics.median(one.tokens / one.seconds for one in all_of) for mode, all_of in found.items()}
    plain = paces.get("off", 0.0)
    lines: list[list[str]] = []
    for mode, all_of in found.items():
        one = all_of[-1]
        lines.append(
            [
                "copying" if case.piece else "idle",
                str(case.rows),
                mode,
                f"{paces[mode]:,.0f}",
                f"{paces[mode] / plain:.3f}" if plain else "",
                f"{one.tokens / max(1, one.row_steps):.2f}",
                f"{one.accepted / one.proposed:.2f}" if one.proposed else "",
                f"{1e3 * statistics.median(each.seconds / max(1, each.steps) for each in all_of):.3f}",
                f"{1e6 * statistics.median(each.host_s / max(1, each.steps) for each in all_of):.0f}",
                "yes" if held[mode] else "NO",
            ]
        )
    return lines


TITLES = ["text", "rows", "mode", "tok/s", "of off", "of a step", "accepted", "ms/step", "host µs", "same text"]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.lookup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:llama-3.1-8b-counting", help="as penstock's --model")
    parser.add_argument("--precision", default="bf16", choices=list(PRECISIONS))
    parser.add_argument("--copying", type=_sizes, default=[1, 8, 64], help="rows at once; several between commas")
    parser.add_argument("--idle", type=_sizes, default=[1, 64, 256], help="rows at once; several between commas")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--depth", type=int, default=4, help="tokens of a proposal, at most")
    parser.add_argument("--piece", type=int, default=64, help="tokens of an answer that stand together in its prompt")
    parser.add_argument("--prompt", type=int, default=384, help="tokens of a copying row's prompt; an idle row's has 64")
    parser.add_argument("--output", type=int, default=256, help="tokens of a copying row; an idle one has half of them")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--token-budget", type=int, default=2048)
    options = parser.parse_args(argv)
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"no such mode: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    return options


def _sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    cases = [Case(rows, options.piece, options.prompt, options.output) for rows in options.copying]
    cases += [Case(rows, 0, 64, options.output // 2) for rows in options.idle]
    max_rows = max(case.rows for case in cases)
    opening = open_runner(
        options.model,
        options.precision,
        device="cuda",
        max_running=max_rows,
        token_budget=options.token_budget,
        max_model_len=options.prompt + options.output + options.depth + 16,
    )
    opening.runner.look_up(max_rows)
    lines: list[list[str]] = []
    for case in cases:
        proposers = {mode: proposers_of(mode, options.depth) for mode in options.modes}
        found: dict[str, list[Found]] = {mode: [] for mode in options.modes}
        answers: dict[str, list[list[int]]] = {}
        for turn in range(options.turns + 1):
            for mode in options.modes:
                one, answers[mode] = generate(opening.runner, case, proposers[mode], options.token_budget)
                found[mode] += [one] if turn else []
        held = {mode: answer == answers[options.modes[0]] for mode, answer in answers.items()}
        lines += lines_of(case, found, held)
        for line in lines[-len(options.modes) :]:
            print("  " + " ".join(line), file=sys.stderr, flush=True)
    print(
        f"# {describe()}\n\n{options.model}, {opening.precision}, loaded in {opening.load_s:.0f} s\n\n{markdown(TITLES, lines)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
