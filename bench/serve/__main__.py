"""The whole stack under load, as its clients see it: `python -m bench.serve`.

    python -m bench.serve                                              SmolLM2 on this CPU: a probe and 1, 4 streams
    python -m bench.serve --device cuda --model dummy:llama-3.1-8b --streams 1,32,256 --engine-throughput measure
    python -m bench.serve --device cuda --model dummy:llama-3.1-8b --rate 2,4,8 --prefill 1
    python -m bench.serve --engine simulated --streams 64              the control plane alone
    python -m bench.serve --url http://127.0.0.1:8000 --streams 8      a Penstock (or another OpenAI server) that runs already

Starts real processes: nats-server, a gateway, decode and prefill workers; the load generator is a process, too. Closed loops
(`--streams`) and Poisson arrivals (`--rate`), a window each, one after the other; before, probes on the idle server. Prints a
table in Markdown, and writes serve.md, serve.json and serve.png to --out.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec

from bench.common.lengths import Lengths
from bench.common.machine import describe
from bench.common.stack import ROOT, Stack, free_ports, quiet_flags, running
from bench.common.table import write_json
from bench.engine.cells import Steady, decode_line
from bench.engine.child import run_child
from bench.serve.client import Objective, Point
from bench.serve.load import Phase, Plan
from bench.serve.report import EngineRate, Report, draw, render
from common.cli.fleet import placements
from common.models.config import load_config
from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.errors import ConfigError, PenstockError
from common.runtime import logs, nats_server, parent_death

MEASURE = "measure"
HEADROOM = 8  # sequences beyond the streams: canaries, and requests that overlap with the end of others
GPU_SHARE = 0.9


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def phase(text: str) -> Phase:
    """:raises ValueError: for anything but NAME=RATE:PROMPT:OUTPUT."""
    name, _, load = text.partition("=")
    rate, prompt, output = load.split(":")
    return Phase(name=name, rate=float(rate), prompt=Lengths.parse(prompt), output=Lengths.parse(output))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="", help="attach to this server, or by turns to these between commas, and start none")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as penstock's --model; with --url: the name it is served by")
    parser.add_argument("--engine", choices=["torch", "simulated"], default="torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpus", type=int, default=1, help="over which workers are spread, with --device cuda")
    parser.add_argument("--gateways", type=int, default=1, help="asked by turns")
    parser.add_argument("--decode", type=int, default=1, help="decode workers")
    parser.add_argument("--prefill", type=int, default=0, help="prefill workers; 0: decode workers prefill")
    parser.add_argument("--worker-flag", action="append", default=[], metavar="--NAME=VALUE", help="for decode and prefill")
    parser.add_argument("--decode-flag", action="append", default=[], metavar="--NAME=VALUE", help="for decode alone")
    parser.add_argument("--gateway-flag", action="append", default=[], metavar="--NAME=VALUE")
    parser.add_argument("--token-budget", type=int, default=0, help="of a step, tokens; 0: 8192 on a GPU, else 256")
    parser.add_argument("--streams", default="", help="closed loops: 1,32,256")
    parser.add_argument("--rate", default="", help="Poisson arrivals per second: 1,2,4.5")
    parser.add_argument("--phase", action="append", default=[], metavar="NAME=RATE:PROMPT:OUTPUT", help="loads by turns")
    parser.add_argument("--phase-seconds", type=float, default=20.0, help="length of a turn")
    parser.add_argument("--prompt", type=Lengths.parse, default=Lengths(64, 64), help="tokens: 512, ~512 (ragged), 100-400")
    parser.add_argument("--output", type=Lengths.parse, default=Lengths.parse("~64"), help="tokens of an answer, likewise")
    parser.add_argument("--sampled", action="store_true", help="the model may end an answer before its length")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each window")
    parser.add_argument("--warmup-seconds", type=float, default=5.0)
    parser.add_argument("--ttft-probe", type=int, default=10, metavar="COUNT", help="probes on the idle server; 0: none")
    parser.add_argument("--probe-prompt", type=int, default=128)
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=50.0)
    parser.add_argument("--engine-throughput", default="", help=f"tok/s of the engine alone, or {MEASURE!r}: find out first")
    parser.add_argument("--precision", default="auto", help="for the engine alone; the workers' are --worker-flag's")
    parser.add_argument("--vocab", type=int, default=30_000, help="with --url: ids below this are sent")
    parser.add_argument("--ready-timeout-s", type=float, default=600.0, help="then the workers' last words are printed")
    parser.add_argument("--out", type=Path, default=Path("build/bench-serve"))
    options = parser.parse_args(argv)
    options.phases = [phase(text) for text in options.phase]
    options.streams, options.rate = [int(n) for n in numbers(options.streams)], numbers(options.rate)
    if not options.streams and not options.rate and not options.phases:
        options.streams = [1, 4]
    options.cuda = options.device.startswith("cuda") or (options.device == "auto" and bool(describe().gpus))
    options.token_budget = options.token_budget or (8192 if options.cuda else 256)
    return options


def max_running(options: argparse.Namespace) -> int:
    """Sequences of one decode worker. Of Poisson arrivals, as many as will come; the queue holds the others."""
    return max([*options.streams, *([256] if options.rate or options.phases else [])]) // options.decode + HEADROOM


def worker_flags(options: argparse.Namespace, role: str) -> list[str]:
    flags = [f"--engine={options.engine}", f"--token-budget={options.token_budget}"]
    if options.engine == "simulated":
        flags += ["--profile=h200-llama-8b", f"--max-running={max_running(options)}", "--kv-cache-mb=64"]
        return flags + options.worker_flag + role_flags(options, role)
    flags += [f"--max-running={max_running(options) if role == 'decode' else 32}"]
    return flags + options.worker_flag + role_flags(options, role)


def places(options: argparse.Namespace) -> list[list[str]]:
    """The flags that say where each worker runs."""
    count = options.decode + options.prefill
    if options.engine == "simulated":
        return [[]] * count
    if options.gpus == 1:
        share = [f"--gpu-memory-utilization={GPU_SHARE / count:.2f}"] if options.cuda and count > 1 else []
        return [[f"--device={options.device}", *share]] * count
    spread = placements([range(options.gpus)] * count)
    return [[f"--device={place.device}", f"--gpu-memory-utilization={place.share:.2f}"] for place in spread]


def role_flags(options: argparse.Namespace, role: str) -> list[str]:
    return options.decode_flag if role == "decode" else []


def engine_alone(options: argparse.Namespace) -> EngineRate | None:
    """:raises ConfigError: if the engine could not be measured."""
    if not options.engine_throughput:
        return None
    rows = max(options.streams, default=1)
    if options.engine_throughput != MEASURE:
        return EngineRate(rows=rows, tok_s=float(options.engine_throughput), source="as told by --engine-throughput")
    flags = [f"--model={options.model}", f"--precision={options.precision}", f"--device={options.device}"]
    flags += [f"--steady={rows}:{options.prompt}:{options.output}", f"--token-budget={options.token_budget}"]
    flags.append(f"--steady-after-s={options.warmup_seconds}")  # both are measured from the same moment of their lives
    found: list[Steady] = []

    def take(text: bytes) -> None:
        line = decode_line(text)
        if isinstance(line, Steady):
            found.append(line)

    error = run_child([sys.executable, "-m", "bench.engine.measure", *flags, f"--max-rows={rows + HEADROOM}"], take)
    if not found or not found[0].tok_s:
        raise ConfigError(f"the engine alone gave no figure: {error or 'too few steps with all rows taken'}")
    return EngineRate(rows=rows, tok_s=found[0].tok_s, source=f"in process, {found[0].seconds:.0f} s with all rows taken")


async def start(stack: Stack, options: argparse.Namespace, nats_url: str) -> list[int]:
    """Start gateways and workers; the gateways' ports once all are ready."""
    ports = free_ports(options.gateways + options.decode + options.prefill)
    gateways, ports = ports[: options.gateways], ports[options.gateways :]
    for index, port in enumerate(gateways):
        name = f"gateway-{index}" if index else "gateway"
        flags = [*quiet_flags(f"{name}-bench", nats_url, options.model, port), *options.gateway_flag]
        stack.start(name, "services.gateway", *flags, "--served-model-name=bench")
    workers = [f"{role}-{index}" for role in ("decode", "prefill") for index in range(getattr(options, role))]
    for worker, port, where in zip(workers, ports, places(options), strict=True):
        role = worker.partition("-")[0]
        flags = [*quiet_flags(worker, nats_url, options.model, port), *worker_flags(options, role), *where]
        stack.start(worker, f"services.{role}", *flags, metrics_port=port)
    for port in gateways:
        await stack.wait_ready(port, options.ready_timeout_s)
    return gateways


async def generate(stack: Stack, plan: Plan) -> list[Point]:
    """Run the load generator. :raises PenstockError: if it fails; its stderr is ours."""
    command = [sys.executable, "-m", "bench.serve.load", msgspec.json.encode(plan).decode()]
    points = []
    async with await anyio.open_process(command, cwd=ROOT, stderr=None) as process:
        stack.watch("load generator", process.pid)
        assert process.stdout is not None
        rest = b""
        async for piece in process.stdout:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                points.append(msgspec.json.decode(line, type=Point))
                print(f"  {points[-1].name}: {points[-1].tokens_per_s:,.1f} tok/s", file=sys.stderr)
    if process.returncode:
        raise PenstockError(f"the load generator ended with status {process.returncode}")
    return points


def plan_for(options: argparse.Namespace, servers: list[tuple[str, int]], model: str, vocab: int) -> Plan:
    return Plan(
        servers=servers,
        model=model,
        vocab=vocab,
        prompt=options.prompt,
        output=options.output,
        fixed=not options.sampled,
        temperature=options.temperature,
        streams=options.streams,
        rates=options.rate,
        phases=options.phases,
        phase_s=options.phase_seconds,
        seconds=options.seconds,
        warmup_s=options.warmup_seconds,
        probes=options.ttft_probe,
        probe_prompt=options.probe_prompt,
        objective=Objective(options.slo_ttft_ms, options.slo_tpot_ms),
    )


async def run(options: argparse.Namespace, folder: Path, report: Report) -> None:
    """Fills in `report`. :raises PenstockError: if something does not start, or the load generator fails."""
    async with running(folder) as stack:
        if options.url:
            urls = options.url.split(",")
            addresses = [urlsplit(url) for url in urls]
            servers = [(address.hostname or "127.0.0.1", address.port or 80) for address in addresses]
            model = options.model if options.model != DEFAULT_MODEL else await first_model(urls[0])
            plan = plan_for(options, servers, model, options.vocab)
            report.points = await generate(stack, plan)
            return
        vocab = load_config(resolve(options.model)).vocab_size
        async with nats_server.start(store_dir=folder / "nats") as server:
            stack.watch("nats-server", server.pid)
            servers = [("127.0.0.1", port) for port in await start(stack, options, server.url)]
            async with stack.sampling():
                report.points = await generate(stack, plan_for(options, servers, "bench", vocab))
            await stack.stop()
    for point in report.points:
        usages = {watched.name: watched.usage(*point.window) for watched in stack.watched}
        report.processes[point.name] = {name: usage for name, usage in usages.items() if usage}


async def first_model(url: str) -> str:
    """:raises ConfigError: if there is no OpenAI server."""
    try:
        async with httpx.AsyncClient(base_url=url, timeout=10) as http:
            return (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"{url} gave no list of models ({error})") from error


def begin_report(options: argparse.Namespace, command: Sequence[str]) -> Report:
    """What was asked for, and of what machine."""
    where = "the simulated engine" if options.engine == "simulated" else options.device
    return Report(
        machine=describe(),
        command=shlex.join(command),
        served=options.url or f"{options.model} on {where}",
        workers="attached" if options.url else f"{options.decode} decode, {options.prefill} prefill",
        prompt=str(options.prompt),
        output=f"{'up to ' if options.sampled else ''}{options.output}",
        objective=Objective(options.slo_ttft_ms, options.slo_tpot_ms),
    )


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    logs.configure("warning", "console")
    report = begin_report(options, ["python", "-m", "bench.serve", *argv])
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        try:
            report.engine = engine_alone(options)
            anyio.run(run, options, Path(folder), report)
        except PenstockError as error:
            print(f"bench.serve: {error}", file=sys.stderr)
            return 1
    print(render(report))
    write_json(options.out / "serve.json", report)
    (options.out / "serve.md").write_text(render(report) + "\n")
    drawn = draw(report, options.out / "serve.png")
    print(f"\nwritten to {options.out}: serve.md, serve.json{', serve.png' if drawn else ''}")
    return 1 if any(point.failed for point in report.points) else 0


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
