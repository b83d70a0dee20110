"""Two workers as a fixed split, as two that do both, and as a split with objectives: `python -m bench.elastic`.

    python -m bench.elastic                                       the simulated engine, times of an 8B model on two H200s
    python -m bench.elastic --prompt 2048 --output 256 --rate 14,18,22
    python -m bench.elastic --scale 2 --gateways 3 --rate 10      twice the workers, three gateways asked by turns
    python -m bench.elastic --device cuda --gpus 2                real engines, each worker on a GPU of its own
    python -m bench.elastic --rate 8,14 --url http://127.0.0.1:8001,http://127.0.0.1:8002 --model NAME     two servers by turns

Each arrangement is a stack of real processes of its own (`bench.serve`), with the same arrivals: Poisson, at each rate, then
prompt-heavy and answer-heavy loads by turns. A request is good if its first token comes within --slo-ttft-ms and its others
within --slo-itl-ms each, on average. Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import anyio

from bench.common.machine import describe
from bench.common.table import markdown
from bench.serve import __main__ as serve
from bench.serve.client import Point
from common.protocol.errors import PenstockError
from common.runtime import logs, parent_death


class Arrangement(NamedTuple):
    workers: dict[str, int]
    has_objectives: bool = False


ARRANGEMENTS = {
    "fixed": Arrangement({"prefill": 1, "decode": 1}),
    "aggregated": Arrangement({"prefill": 0, "decode": 2}),
    "aggregated with objectives": Arrangement({"prefill": 0, "decode": 2}, True),
    "elastic": Arrangement({"prefill": 1, "decode": 1}, True),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.elastic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="", help="cuda: real engines; by default the simulated one")
    parser.add_argument("--gpus", type=int, default=1, help="with --device cuda: over which the workers are spread")
    parser.add_argument("--gateways", type=int, default=1, help="asked by turns")
    parser.add_argument("--scale", type=int, default=1, help="so many times the workers of an arrangement")
    parser.add_argument("--url", default="", help="other servers, asked by turns, in place of all arrangements")
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--prompt", default="8192")
    parser.add_argument("--output", default="128")
    parser.add_argument("--rate", default="3,5,7", help="Poisson arrivals per second; empty: none")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each rate")
    parser.add_argument("--flips", type=int, default=2, help="rounds of the two loads by turns; 0: none")
    parser.add_argument("--phase-seconds", type=float, default=20.0)
    parser.add_argument("--prompt-heavy", default="5:8192:64", metavar="RATE:PROMPT:OUTPUT")
    parser.add_argument("--answer-heavy", default="16:512:512", metavar="RATE:PROMPT:OUTPUT")
    parser.add_argument("--slo-ttft-ms", type=float, default=500.0)
    parser.add_argument("--slo-itl-ms", type=float, default=20.0)
    parser.add_argument("--arrangements", default=",".join(ARRANGEMENTS), help=f"of {'; '.join(ARRANGEMENTS)}")
    options = parser.parse_args(argv)
    options.names = [options.url] if options.url else [name.strip() for name in options.arrangements.split(",")]
    if not options.url and (unknown := [name for name in options.names if name not in ARRANGEMENTS]):
        parser.error(f"no arrangement {unknown[0]!r}: use some of {'; '.join(ARRANGEMENTS)}")
    return options


def flags(options: argparse.Namespace, arrangement: Arrangement, load: Sequence[str]) -> list[str]:
    """The command line of `bench.serve` for one arrangement and load."""
    objectives = [f"--slo-ttft-ms={options.slo_ttft_ms}", f"--slo-tpot-ms={options.slo_itl_ms}"]
    if options.url:
        return [f"--url={options.url}", *objectives, f"--model={options.model}", "--ttft-probe=3", *load]
    given = [f"--{role}={options.scale * count}" for role, count in arrangement.workers.items()]
    if arrangement.has_objectives:
        given += [f"--gateway-flag=--slo-ttft-ms={options.slo_ttft_ms}", f"--decode-flag=--slo-itl-ms={options.slo_itl_ms}"]
    simulated = ["--engine=simulated", "--worker-flag=--kv-cache-mb=600"]
    given += [f"--device={options.device}", f"--gpus={options.gpus}"] if options.device else simulated
    given += [f"--gateways={options.gateways}"]
    return [*given, *objectives, f"--model={options.model}", "--token-budget=8192", "--ttft-probe=3", *load]


async def measure(argv: list[str]) -> list[Point]:
    """:raises PenstockError: if something does not start, or the load generator fails."""
    options = serve.parse(argv)
    report = serve.begin_report(options, argv)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        await serve.run(options, Path(folder), report)
    return [point for point in report.points if not point.name.startswith("idle")]


def render(points: dict[str, list[Point]]) -> str:
    rows = [
        [
            name,
            point.name,
            f"{point.sent}",
            f"{point.failed}",
            f"{point.good_share:.0%}",
            f"{point.tokens_per_s:,.0f}",
            f"{point.ttft_ms.p50:,.0f} / {point.ttft_ms.p99:,.0f}",
            f"{point.itl_ms.p50:.1f} / {point.itl_ms.p99:.1f}",
            f"{point.tpot_ms.p50:.1f}",
        ]
        for name, measured in points.items()
        for point in measured
    ]
    head = ["arrangement", "load", "sent", "failed", "good", "tok/s", "TTFT p50 / p99, ms", "ITL p50 / p99, ms", "TPOT p50, ms"]
    return markdown(head, rows)


async def main(options: argparse.Namespace) -> None:
    print(f"{describe()}\n\n    python -m bench.elastic {' '.join(sys.argv[1:])}\n")
    loads: list[list[str]] = []
    if options.rate:
        loads.append([f"--rate={options.rate}", f"--seconds={options.seconds}", f"--prompt={options.prompt}"])
        loads[-1].append(f"--output={options.output}")
    if options.flips:
        seconds = 2 * options.flips * options.phase_seconds
        phases = [f"--phase=prompt-heavy={options.prompt_heavy}", f"--phase=answer-heavy={options.answer_heavy}"]
        loads.append([*phases, f"--phase-seconds={options.phase_seconds}", f"--seconds={seconds}"])
    points: dict[str, list[Point]] = {}
    for load in loads:
        for name in options.names:
            points.setdefault(name, []).extend(await measure(flags(options, ARRANGEMENTS.get(name, Arrangement({})), load)))
    print(render(points))


if __name__ == "__main__":
    parent_death.guard()
    logs.configure("warning", "console")
    try:
        anyio.run(main, parse(sys.argv[1:]))
    except PenstockError as error:
        sys.exit(f"bench.elastic: {error}")
