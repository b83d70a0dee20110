"""How much one gateway process carries, and what it adds: `python -m bench.control_plane`.

Real processes on a real nats-server; only the engines are simulated, paced by a roofline: `--engine-tokens-per-s` in
all if nothing else took time (0: as fast as they go). Everything shares this machine's cores, the load generator included.

    nats-server · services.gateway · services.decode (and prefill, draft) · bench.control_plane.load

`--workers N` runs N decode workers, and one prefill worker for every four, as many actors per process: what a large fleet's
heartbeats and choices cost. Heartbeats go to whoever needs them, still pool by pool: `--heartbeat-s` is raised with N.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec

from bench.common.stack import ROOT, Stack, free_ports, quiet_flags, running
from bench.control_plane.report import Load, Report, render
from common.engine.simulated import roofline
from common.protocol.errors import PenstockError
from common.runtime import logs, nats_server

GATEWAY = "gateway-bench"
PROFILE = "h200-llama-8b"
MODEL_NAME = "control-plane"
FARM_SIZE = 50
HEADROOM = 16  # sequences beyond the streams: probes and canaries


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.control_plane", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the measured window")
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams")
    parser.add_argument("--engine-tokens-per-s", type=float, default=32_000, help="engines' own speed in all; 0: no pacing")
    parser.add_argument("--decode", type=int, default=1, help="decode processes")
    parser.add_argument("--prefill", type=int, default=0, help="prefill processes")
    parser.add_argument("--draft", type=int, default=0, help="draft processes")
    parser.add_argument(
        "--workers", type=int, default=0, help="simulated decode workers, many per process, instead of --decode"
    )
    parser.add_argument("--heartbeat-s", type=float, default=0.0, help="0: 0.25, and more for many workers")
    parser.add_argument("--max-tokens", type=int, default=256, help="mean tokens of an answer")
    parser.add_argument("--prompt-words", type=int, default=16)
    parser.add_argument("--probe-rate", type=float, default=10.0, help="first-token probes per second; 0: none")
    parser.add_argument("--idle-seconds", type=float, default=5.0, help="probes without load before the streams start")
    parser.add_argument("--warmup-seconds", type=float, default=5.0)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer and template are used")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    if options.streams < 1 or options.seconds <= 0 or options.decode + options.workers < 1:
        parser.error("at least one stream, one worker and some seconds are needed")
    return options


def engine_flags(options: argparse.Namespace, num_decode: int) -> list[str]:
    """The simulated engine, so paced that all decode workers together offer what was asked for."""
    rows = math.ceil(options.streams / num_decode)
    context = options.prompt_words * 2 + options.max_tokens
    step_s = roofline.profile(PROFILE).step_s(num_tokens=rows, kv_tokens=rows * context, pairs=rows * context)
    rate = options.engine_tokens_per_s
    # worst case: every stream at its longest on one worker, 1.5 times the mean
    blocks = (options.streams + HEADROOM) * math.ceil((options.prompt_words * 4 + 64 + 1.5 * options.max_tokens) / 16)
    return [
        "--engine=simulated",
        f"--profile={PROFILE if rate else 'instant'}",
        f"--time-scale={options.streams / rate / step_s if rate else 0.0:.6f}",
        f"--num-blocks={blocks}",
        f"--max-running={options.streams + HEADROOM}",
        f"--token-budget={options.streams + HEADROOM + 512}",
    ]


def heartbeat_flags(options: argparse.Namespace, num_workers: int) -> list[str]:
    beat_s = options.heartbeat_s or max(0.25, num_workers**2 / 100_000)
    return [f"--heartbeat-s={beat_s:g}", f"--dead-after-s={max(2.0, 8 * beat_s):g}"]


def start_workers(stack: Stack, options: argparse.Namespace, nats_url: str) -> dict[str, list[str]]:
    """Start every worker; returns their ids by role."""
    if options.workers:
        ids = {
            "decode": [f"decode-farm-{index}" for index in range(options.workers)],
            "prefill": [f"prefill-farm-{index}" for index in range(options.workers // 4)],
        }
        flags = engine_flags(options, options.workers) + heartbeat_flags(options, sum(map(len, ids.values())))
        shared = [f"--nats-url={nats_url}", f"--model={options.model}", *flags]
        for role, workers in ids.items():
            for begin in range(0, len(workers), FARM_SIZE):
                own = ",".join(workers[begin : begin + FARM_SIZE])
                stack.start(
                    f"{role}-farm-{begin // FARM_SIZE}", "bench.control_plane.farm", f"--role={role}", f"--ids={own}", *shared
                )
        return ids
    counts = {"decode": options.decode, "prefill": options.prefill, "draft": options.draft}
    ids = {role: [f"{role}-bench-{index}" for index in range(count)] for role, count in counts.items()}
    beats = heartbeat_flags(options, sum(counts.values()))
    for role, workers in ids.items():
        for worker, port in zip(workers, free_ports(len(workers)), strict=True):
            engine = engine_flags(options, options.decode) if role != "draft" else []
            flags = [*quiet_flags(worker, nats_url, options.model, port), *engine, *beats]
            stack.start(worker, f"services.{role}", *flags, metrics_port=port)
    return ids


async def run(options: argparse.Namespace, folder: Path) -> Report:
    """:raises PenstockError: if something does not start, or the load generator fails."""
    async with nats_server.start(store_dir=folder / "nats") as server, running(folder) as stack:
        (port,) = free_ports(1)
        num_workers = options.workers + options.workers // 4 if options.workers else options.decode + options.prefill
        flags = [*quiet_flags(GATEWAY, server.url, options.model, port), *heartbeat_flags(options, num_workers)]
        stack.watch("nats-server", server.pid)
        stack.start("gateway", "services.gateway", *flags, f"--served-model-name={MODEL_NAME}")
        ids = start_workers(stack, options, server.url)
        await stack.wait_ready(port)
        tasked = ",".join(f"{role}:{worker}" for role, workers in ids.items() if role != "draft" for worker in workers)
        load_flags = [
            f"--{name}={getattr(options, name.replace('-', '_'))}"
            for name in ("streams", "seconds", "max-tokens", "prompt-words", "probe-rate", "idle-seconds", "warmup-seconds")
        ]
        load_flags += [f"--port={port}", f"--nats-url={server.url}", f"--gateway={GATEWAY}", f"--workers={tasked}"]
        load_flags += [f"--model={options.model}", f"--model-name={MODEL_NAME}"]
        async with stack.sampling():
            load = await generate(stack, load_flags)
    usages = {watched.name: watched.usage(*load.window) for watched in stack.watched}
    steps_per_s = sum(watched.steps_per_s(*load.window) for watched in stack.watched)
    gateway = usages["gateway"]
    return Report(
        workers={role: len(workers) for role, workers in ids.items() if workers},
        engine_tokens_per_s=options.engine_tokens_per_s,
        load=load,
        steps_per_s=steps_per_s,
        messages_per_step=load.frame_messages_per_s / steps_per_s if steps_per_s else 0.0,
        gateway_us_per_token=1e4 * gateway.cpu_percent / load.tokens_per_s if gateway and load.tokens_per_s else 0.0,
        processes={name: usage for name, usage in usages.items() if usage is not None},
    )


async def generate(stack: Stack, flags: Sequence[str]) -> Load:
    """Run the load generator. :raises PenstockError: if it fails; its stderr is ours."""
    command = [sys.executable, "-m", "bench.control_plane.load", *flags]
    async with await anyio.open_process(command, cwd=ROOT, stderr=None) as process:
        stack.watch("load generator", process.pid)
        assert process.stdout is not None
        output = b"".join([piece async for piece in process.stdout])
    if process.returncode:
        raise PenstockError(f"the load generator ended with status {process.returncode}")
    return msgspec.json.decode(output, type=Load)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    logs.configure("warning", "console")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        try:
            report = anyio.run(run, options, Path(folder))
        except PenstockError as error:
            print(f"bench.control_plane: {error}", file=sys.stderr)
            return 1
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print(render(report))
    return 1 if report.load.errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
