"""Is the engine right, and how far off are its precisions? `python -m bench.engine.accuracy`.

    greedy      tokens of prompts of real text, fp32 on the device beside fp32 on the CPU: equal
    text        real text forced through decoding in each precision: perplexity; and against fp32 on the device, the error of
                each token's log-probability and how often the likeliest token is the same
    invariance  with batch_invariant: the same request alone and among others, equal bit for bit; what it costs in tok/s

On a GPU: SmolLM2-135M in fp32, bf16 and FP8 (weights and KV). `--device cpu` compares fp32 with what `auto` is there: a trial.
Prints tables in Markdown, and writes accuracy.md and accuracy.json to --out. Ends with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.common.machine import Machine, describe
from bench.common.table import markdown, number, ratio, write_json
from bench.engine.cells import Failed, Measured, decode_line
from bench.engine.child import run_child
from bench.engine.observe import Observed, Wanted
from common.models.source import DEFAULT_MODEL
from common.runtime import parent_death

MAX_PERPLEXITY_RATIO = 1.01


class Agreement(msgspec.Struct, kw_only=True):
    """Forced text in one precision; against the reference where there is one. Errors are of natural logs."""

    name: str
    precision: str
    perplexity: float
    tokens: int
    fp8_share: float = 0.0
    top1: float = 0.0
    mean_error: float = 0.0
    p99_error: float = 0.0
    max_error: float = 0.0
    greedy_equal: int = 0
    greedy_tokens: float = 0.0


class Cost(msgspec.Struct, kw_only=True):
    cell: str
    off: float
    on: float


class Report(msgspec.Struct, kw_only=True):
    """`greedy_equal` of `greedy_prompts`: device fp32 beside CPU fp32. `observed` by name, without the tokens themselves."""

    machine: Machine
    command: str
    model: str
    device: str
    greedy_prompts: int = 0
    greedy_tokens: int = 0
    greedy_equal: int = 0
    agreements: list[Agreement] = []
    invariance: dict[str, Observed] = {}
    costs: list[Cost] = []
    problems: list[str] = []


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="", help="besides fp32; a GPU: bf16,fp8-weights,fp8; a CPU: auto,bf16")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each greedy answer")
    parser.add_argument("--rows", type=int, default=64, help="pieces of forced text")
    parser.add_argument("--row-tokens", type=int, default=512, help="tokens of each")
    parser.add_argument("--subjects", type=int, default=4, help="requests looked at alone and among others; 0: none")
    parser.add_argument(
        "--cost-model", default="dummy:llama-3.1-8b", help="whose speed with and without batch_invariant counts"
    )
    parser.add_argument("--cost-cells", default="1x128x128,32x512x128,256x512x64", help="empty: not measured; a CPU: never")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of each process")
    parser.add_argument("--out", type=Path, default=Path("build/bench-accuracy"))
    options = parser.parse_args(argv)
    if options.device == "auto":
        options.device = "cuda" if describe().gpus else "cpu"
    on_cpu = options.device == "cpu"
    options.precision = (options.precision or ("auto,bf16" if on_cpu else "bf16,fp8-weights,fp8")).split(",")
    return options


def observe(report: Report, wanted: Wanted, limit_s: float) -> Observed | None:
    """What another process saw; None, and a problem in the report, if it failed."""
    found: list[Observed] = []

    def take(text: bytes) -> None:
        found.append(msgspec.json.decode(text, type=Observed))

    name = f"{wanted.precision} on {wanted.device}{', batch_invariant' if wanted.settings.get('batch_invariant') else ''}"
    command = [sys.executable, "-m", "bench.engine.observe", msgspec.json.encode(wanted).decode()]
    error = run_child(command, take, limit_s=limit_s)
    if not found:
        report.problems.append(f"{name}: {error or 'no result'}")
        return None
    print(f"  {name}: {found[0].seconds:.0f} s", file=sys.stderr)
    return found[0]


def write(report: Report, out: Path) -> None:
    """After every step: what comes later may run out of time."""
    write_json(out / "accuracy.json", report)
    (out / "accuracy.md").write_text(render(report) + "\n")


def agreement(name: str, observed: Observed, reference: Observed | None) -> Agreement:
    scores = [score for row in observed.forced for score in row]
    result = Agreement(
        name=name,
        precision=observed.precision,
        perplexity=math.exp(-sum(score.logprob for score in scores) / len(scores)),
        tokens=len(scores),
        fp8_share=observed.fp8_share,
    )
    if reference is None:
        return result
    wanted = [score for row in reference.forced for score in row]
    errors = sorted(abs(a.logprob - b.logprob) for a, b in zip(scores, wanted, strict=True))
    result.top1 = sum(a.top == b.top for a, b in zip(scores, wanted, strict=True)) / len(scores)
    result.mean_error = sum(errors) / len(errors)
    result.p99_error = errors[min(len(errors) - 1, int(0.99 * len(errors)))]
    result.max_error = errors[-1]
    result.greedy_equal = equal(observed, reference)
    result.greedy_tokens = common_prefix(observed, reference)
    return result


def equal(one: Observed, other: Observed) -> int:
    return sum(a == b for a, b in zip(one.greedy, other.greedy, strict=True))


def common_prefix(one: Observed, other: Observed) -> float:
    """Tokens until two greedy answers part, on average: a close call that falls the other way changes all that follows."""
    lengths = []
    for a, b in zip(one.greedy, other.greedy, strict=True):
        lengths.append(next((index for index, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)))
    return sum(lengths) / len(lengths) if lengths else 0.0


def run(options: argparse.Namespace, report: Report) -> None:
    """Fills in `report`."""
    wanted = Wanted(
        model=options.model,
        precision="fp32",
        device=options.device,
        prompts=options.prompts,
        tokens=options.tokens,
        rows=options.rows,
        row_tokens=options.row_tokens,
    )
    reference = observe(report, wanted, options.limit_s)
    if reference is not None:
        report.agreements.append(agreement("fp32", reference, None))
        write(report, options.out)
        if options.device != "cpu":
            on_cpu = observe(report, msgspec.structs.replace(wanted, device="cpu", rows=0), options.limit_s)
            if on_cpu is not None:
                report.greedy_prompts, report.greedy_tokens = options.prompts, options.tokens
                report.greedy_equal = equal(reference, on_cpu)
                if report.greedy_equal < options.prompts:
                    report.problems.append(
                        f"{options.prompts - report.greedy_equal} greedy answers differ from the CPU's in fp32"
                    )
    for precision in options.precision:
        observed = observe(report, msgspec.structs.replace(wanted, precision=precision), options.limit_s)
        if observed is not None:
            report.agreements.append(agreement(precision, observed, reference))
            write(report, options.out)
    by_name = {one.name: one.perplexity for one in report.agreements}
    for name in by_name:
        if name.startswith("fp8") and "bf16" in by_name and by_name[name] > MAX_PERPLEXITY_RATIO * by_name["bf16"]:
            report.problems.append(f"{name}: perplexity is {by_name[name] / by_name['bf16']:.4f} times bf16's")
    if options.subjects:
        invariance(options, report, wanted)
    if options.cost_cells and options.device != "cpu":
        costs(options, report)


def invariance(options: argparse.Namespace, report: Report, wanted: Wanted) -> None:
    base = msgspec.structs.replace(wanted, prompts=0, rows=0, subjects=options.subjects)
    precisions = [name for name in options.precision if name in ("bf16", "fp8")] or options.precision[:1]
    for precision in precisions:
        for on in (True, False):
            settings = {"batch_invariant": on}
            observed = observe(report, msgspec.structs.replace(base, precision=precision, settings=settings), options.limit_s)
            if observed is None:
                continue
            report.invariance[f"{precision}, batch_invariant {'on' if on else 'off'}"] = observed
            write(report, options.out)
            different = sum(not one.same_bits for one in observed.compared)
            if on and different:
                report.problems.append(f"{precision}: {different} of {len(observed.compared)} answers differ in a batch")


def costs(options: argparse.Namespace, report: Report) -> None:
    rates: list[dict[str, float]] = []
    for on in ("false", "true"):
        measured: dict[str, float] = {}

        def take(text: bytes, measured: dict[str, float] = measured, on: str = on) -> None:
            line = decode_line(text)
            if isinstance(line, Measured):
                measured[line.cell] = line.tok_s
            elif isinstance(line, Failed):
                report.problems.append(f"batch_invariant {on}: {line.cell}: {line.error}")

        flags = [f"--model={options.cost_model}", "--precision=bf16", f"--device={options.device}", "--no-ceilings"]
        flags += [f"--cells={options.cost_cells}", f"--set=batch_invariant={on}"]
        error = run_child([sys.executable, "-m", "bench.engine.measure", *flags], take, limit_s=options.limit_s)
        report.problems += [f"cost of batch_invariant {on}: {error}"] if error else []
        rates.append(measured)
    off, on = rates
    report.costs = [Cost(cell=cell, off=off.get(cell, 0.0), on=on.get(cell, 0.0)) for cell in dict.fromkeys([*off, *on])]


def render(report: Report) -> str:
    parts = [f"# Accuracy\n\n{report.machine}\n\n    {report.command}", f"{report.model} on {report.device}."]
    if report.greedy_prompts:
        parts.append(
            f"Greedy, fp32 on the device beside fp32 on the CPU: {report.greedy_equal} of {report.greedy_prompts} answers of"
            f" {report.greedy_tokens} tokens are equal."
        )
    base = next((one.perplexity for one in report.agreements if one.name == "bf16"), 0.0)
    rows = [
        (
            one.name,
            one.precision,
            f"{100 * one.fp8_share:.0f}%" if one.fp8_share else "—",
            f"{one.perplexity:.4f}",
            f"{one.perplexity / base:.4f}" if base else "—",
            f"{100 * one.top1:.2f}%" if one.top1 else "—",
            f"{one.mean_error:.5f}" if one.top1 else "—",
            f"{one.p99_error:.5f}" if one.top1 else "—",
            f"{one.max_error:.5f}" if one.top1 else "—",
            str(one.greedy_equal) if one.top1 else "—",
            f"{one.greedy_tokens:.1f}" if one.top1 else "—",
        )
        for one in report.agreements
    ]
    titles = (
        "precision",
        "compute/weights/KV",
        "linears in FP8",
        "perplexity",
        "x bf16's",
        "same top token",
        "error of log p: mean",
        "p99",
        "max",
    )
    if rows:
        parts.append(
            f"Real text, {report.agreements[0].tokens:,} tokens, forced through decoding; errors against fp32 on the device:"
        )
        parts.append(markdown((*titles, "equal answers", "tokens until they part"), rows))
    if report.invariance:
        parts.append("The same request alone and among others:")
        parts.append(
            markdown(("engine", "comparisons", "same tokens", "same bits", "largest error of log p"), _invariance(report))
        )
    if report.costs:
        rows = [(c.cell, number(c.off), number(c.on), ratio(c.on, c.off)) for c in report.costs]
        parts.append(markdown(("decode tok/s, bf16", "batch_invariant off", "on", "on/off"), rows))
    return "\n\n".join([*parts, *(f"PROBLEM: {problem}" for problem in report.problems)])


def _invariance(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            name,
            str(len(observed.compared)),
            str(sum(one.same_tokens for one in observed.compared)),
            str(sum(one.same_bits for one in observed.compared)),
            f"{max((one.largest_error for one in observed.compared), default=0.0):.2g}",
        )
        for name, observed in report.invariance.items()
    ]


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    command = shlex.join(["python", "-m", "bench.engine.accuracy", *argv])
    report = Report(machine=describe(), command=command, model=options.model, device=options.device)
    run(options, report)
    print(render(report))
    write(report, options.out)
    print(f"\nwritten to {options.out}: accuracy.md, accuracy.json")
    return 1 if report.problems else 0


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
