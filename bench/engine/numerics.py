"""How far off are a GPU's precisions? Found on a CPU, in the reference ops: `python -m bench.engine.numerics`.

Real text of several kinds is forced through the model in float32 and in each precision (see `reference_decoder`): perplexity,
and against float32 the error of each token's log-probability and how often the likeliest token is the same. FP8 weights meet
bf16 activations in steps of few rows and quantised ones in steps of many: W8A16 and W8A8, each for the whole text. They are
all the linears', whatever that costs: how many a server leaves in FP8 is measured by it
(`common.engine.load.fp8_choice`). `--parts` looks at the kinds of linears one by one instead.

Prints tables in Markdown, and writes numerics.md and numerics.json to --out. Ends with 1 if FP8 KV costs more perplexity than
it may. The tests compare it with the GPU engine, its kernels interpreted. On a card: `python -m bench.engine.accuracy`.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import msgspec
import torch

from bench.common.machine import Machine, describe
from bench.common.table import markdown, write_json
from bench.engine.accuracy import MAX_PERPLEXITY_RATIO, Agreement, agreement
from bench.engine.observe import Observed, Scored
from bench.engine.opening import PRECISIONS
from bench.engine.reference_decoder import ReferenceDecoder
from bench.engine.texts import sources, spread
from common.engine.load.fp8_choice import measure
from common.engine.load.precision import Compute, Precision, Weights
from common.engine.load.runners import EngineConfig, resolve_engine_precision
from common.engine.load.sample_text import SAMPLE_TEXT
from common.models.config import ModelConfig, load_config
from common.models.decoder import Decoder
from common.models.registry import load_decoder
from common.models.source import DEFAULT_MODEL, resolve
from common.ops.linear.weight import Role
from common.runtime import parent_death
from common.text.tokenizer import load_tokenizer

TOGETHER = 4
"""Rows: an FP8 weight is widened each time."""
NONE: frozenset[Role] = frozenset()
ROLES: tuple[Role, ...] = ("qkv", "output", "gate_up", "down")  # the head's weight stays in the model's dtype
LINEARS = frozenset(ROLES)

Open = Callable[[Compute, Weights], Decoder]


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """precision: a name in `PRECISIONS`. fp8: the linears whose weights are FP8, where it has some; quantised: those of them
    that take quantised activations."""

    name: str
    precision: str
    fp8: frozenset[Role] = LINEARS
    quantised: frozenset[Role] = NONE


REFERENCE = Variant(name="fp32", precision="fp32")
BASE = Variant(name="bf16", precision="bf16")
POOL = Variant(name="FP8 KV", precision="fp8-kv")
ENGINES = (
    Variant(name="FP8 weights, W8A16", precision="fp8-weights"),
    Variant(name="FP8 weights, W8A8", precision="fp8-weights", quantised=LINEARS),
    POOL,
    Variant(name="FP8 weights and KV, W8A16", precision="fp8"),
    Variant(name="FP8 weights and KV, W8A8", precision="fp8", quantised=LINEARS),
)
"""What a GPU's engine does, by its settings and the number of rows in a step."""
PARTS = (
    ENGINES[1],
    *(
        Variant(name=f"only {role}, W8A8", precision="fp8-weights", fp8=frozenset({role}), quantised=frozenset({role}))
        for role in ROLES
    ),
    *(
        Variant(name=f"all W8A8, {role} W8A16", precision="fp8-weights", quantised=LINEARS - frozenset({role}))
        for role in ROLES
    ),
)
"""Which kind of linear costs what, and what it would help to leave its activations as they are."""


class Found(msgspec.Struct, kw_only=True):
    """ratio, ratio_error: of the perplexity to bf16's, and its standard error; by_text: the ratio of each text."""

    agreement: Agreement
    ratio: float = 0.0
    ratio_error: float = 0.0
    by_text: dict[str, float] = {}


class Report(msgspec.Struct, kw_only=True):
    machine: Machine
    command: str
    model: str
    texts: dict[str, str] = {}
    found: list[Found] = []
    problems: list[str] = []


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.numerics", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rows", type=int, default=10, help="pieces of each text")
    parser.add_argument("--row-tokens", type=int, default=544, help="tokens of each")
    parser.add_argument("--row-prompt", type=int, default=32, help="of which the first so many are not scored")
    parser.add_argument("--parts", action="store_true", help="instead: FP8 in one kind of linear at a time, and in all but one")
    parser.add_argument("--threads", type=int, default=0, help="0: every core this process may use")
    parser.add_argument("--out", type=Path, default=Path("build/bench-numerics"))
    return parser.parse_args(argv)


# ── the model in each precision ──────────────────────────────────────────────────────────────────────────────────────


def score(decoder: ReferenceDecoder, rows: Sequence[Sequence[int]], prompt: int, threads: int = 1) -> list[list[Scored]]:
    """Tokens [prompt, …) of each row: how likely they were, and what was likeliest in their places. rows: equally long."""

    def scored(some: Sequence[Sequence[int]]) -> list[list[Scored]]:
        tokens = torch.tensor(some)
        found: list[list[Scored]] = []
        for row, logits in zip(tokens, decoder.logits(tokens[:, :-1]), strict=True):
            logprobs = logits[prompt - 1 :].float().log_softmax(-1)
            chosen = logprobs.gather(1, row[prompt:, None])[:, 0].tolist()
            found.append([Scored(*one) for one in zip(chosen, logprobs.argmax(-1).tolist(), strict=True)])
        return found

    with ThreadPoolExecutor(threads) as pool:
        batches = pool.map(scored, [rows[first : first + TOGETHER] for first in range(0, len(rows), TOGETHER)])
        return [row for batch in batches for row in batch]


def assemble(variant: Variant, model: ModelConfig, opened: Open) -> tuple[ReferenceDecoder, Precision]:
    """The decoder of `variant`, and what its settings mean on a GPU. `opened` loads decoders, each once."""
    precision = resolve_engine_precision(model, EngineConfig(**PRECISIONS[variant.precision]), "cuda:0")
    decoder = opened(precision.compute, precision.weights)
    if precision.weights == "fp8" and variant.fp8 != LINEARS:
        plain = opened(precision.compute, "none")
        decoder = copy.copy(decoder)
        decoder.layers = [
            layer.with_linears({role: other.linears[role] for role in LINEARS - variant.fp8})
            for layer, other in zip(decoder.layers, plain.layers, strict=True)
        ]
    kv = torch.float8_e4m3fn if precision.kv == "fp8" else getattr(torch, precision.kv)
    return ReferenceDecoder(decoder, kv, variant.quantised), precision


def run(options: argparse.Namespace, report: Report) -> None:
    """Fills in `report`."""
    files = resolve(options.model)
    model, tokenizer = load_config(files), load_tokenizer(files)

    @cache
    def center() -> torch.Tensor:
        plain = load_decoder(files, model, dtype=torch.bfloat16, device=torch.device("cpu"))
        return measure(plain, None, tokenizer.encode(SAMPLE_TEXT), 0.0, kv=False).center(model, plain.device)

    @cache
    def opened(compute: Compute, weights: Weights) -> Decoder:
        dtype = getattr(torch, compute)
        decoder = load_decoder(files, model, dtype=dtype, device=torch.device("cpu"), weights=weights)
        decoder.k_center = center()
        return decoder

    texts: dict[str, list[list[int]]] = {}
    for name, (about, text) in sources().items():
        texts[name] = spread(tokenizer.encode(text), options.rows, options.row_tokens)
        report.texts[name] = f"{about}: {len(texts[name])} pieces"
    rows = [row for found in texts.values() for row in found]
    observed: dict[str, Observed] = {}
    for variant in (REFERENCE, BASE, *(PARTS if options.parts else ENGINES)):
        begun = time.perf_counter()
        decoder, precision = assemble(variant, model, opened)
        forced = score(decoder, rows, options.row_prompt, options.threads)
        seen = Observed(precision=precision.name, device="cpu", forced=forced)
        observed[variant.name] = seen
        found = Found(agreement=agreement(variant.name, seen, observed[REFERENCE.name] if variant != REFERENCE else None))
        if base := observed.get(BASE.name):
            found.ratio, found.ratio_error = perplexity_ratio(seen.forced, base.forced)
            first = 0
            for name, pieces in texts.items():
                part = slice(first, first + len(pieces))
                found.by_text[name], _ = perplexity_ratio(seen.forced[part], base.forced[part])
                first = part.stop
        report.found.append(found)
        print(f"  {variant.name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    report.problems += [
        f"{one.agreement.name}: perplexity is {one.ratio:.4f} times bf16's"
        for one in report.found
        if one.agreement.name == POOL.name and one.ratio > MAX_PERPLEXITY_RATIO
    ]


def perplexity_ratio(rows: Sequence[Sequence[Scored]], base: Sequence[Sequence[Scored]]) -> tuple[float, float]:
    """To that of `base` on the same text, and its standard error, over tokens."""
    pairs = zip((one for row in rows for one in row), (one for row in base for one in row), strict=True)
    differences = [other.logprob - one.logprob for one, other in pairs]
    ratio = math.exp(statistics.fmean(differences))
    return ratio, ratio * statistics.stdev(differences) / math.sqrt(len(differences))


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


def render(report: Report) -> str:
    texts = "\n".join(f"- {name}: {about}" for name, about in report.texts.items())
    tokens = report.found[0].agreement.tokens if report.found else 0
    parts = [
        f"# Numerics\n\n{report.machine}\n\n    {report.command}",
        f"{report.model}, computed on a CPU with the reference ops; {tokens:,} tokens of real text, errors against fp32:",
        texts,
        markdown(
            (
                *("precision", "compute/weights/KV", "perplexity", "x bf16's", "±", "same top token"),
                *("error of log p: mean", "p99", "max"),
            ),
            [_line(found) for found in report.found],
        ),
        "Perplexity, times bf16's, by text:",
        markdown(
            ("precision", *report.texts),
            [
                (found.agreement.name, *(f"{found.by_text[name]:.4f}" for name in report.texts))
                for found in report.found
                if found.by_text
            ],
        ),
    ]
    return "\n\n".join([*parts, *(f"PROBLEM: {problem}" for problem in report.problems)])


def _line(found: Found) -> tuple[str, ...]:
    one = found.agreement
    known = found.agreement.top1 > 0
    return (
        *(one.name, one.precision, f"{one.perplexity:.4f}"),
        f"{found.ratio:.4f}" if found.ratio else "—",
        f"{found.ratio_error:.4f}" if found.ratio_error else "—",
        f"{100 * one.top1:.2f}%" if known else "—",
        *(f"{error:.4f}" if known else "—" for error in (one.mean_error, one.p99_error, one.max_error)),
    )


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    options.threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(1)  # threads of one op wait for each other, which a shared machine makes long; ours have batches
    command = shlex.join(["python", "-m", "bench.engine.numerics", *argv])
    report = Report(machine=describe(), command=command, model=options.model)
    run(options, report)
    print(render(report))
    write_json(options.out / "numerics.json", report)
    (options.out / "numerics.md").write_text(render(report) + "\n")
    print(f"\nwritten to {options.out}: numerics.md, numerics.json")
    return 1 if report.problems else 0


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
