"""Our engine, the card's limit and the peer, over batch sizes and lengths, in one run: `python -m bench.engine`.

    python -m bench.engine                                                on a GPU: the 8B shape in bf16 and FP8
    python -m bench.engine --peer /tmp/vllm                               beside vLLM (see bench/peer/README.md)
    python -m bench.engine --model dummy:qwen3-8b,dummy:qwen3-32b --cells decode,prefill,long,ragged
    python -m bench.engine --device cpu                                   a small run, to see what it prints

For each model and precision a process of its own opens the engine and measures; the peer's process ends before. Prints tables
in Markdown, and writes engine.md, engine.json and engine.png to --out. Also: `bench.engine.kernels`, `bench.engine.accuracy`,
`bench.engine.numerics`, `bench.engine.gpu_session`, and `bench.engine.table` for many models.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.common.machine import ROOT, describe
from bench.common.table import write_json
from bench.engine import gate
from bench.engine.cells import PRESETS, Cell, decode_line, parse_cells
from bench.engine.child import run_child
from bench.engine.goals import find, load_goals
from bench.engine.report import Part, Report, Side, Start, draw, render, render_part
from bench.peer.model_config import hugging_face_config
from common.models.source import DEFAULT_MODEL, resolve
from common.protocol.errors import PenstockError
from common.runtime import parent_death

INSTALLED = "installed"
CACHES = ("TRITON_CACHE_DIR", "PENSTOCK_KERNEL_CACHE", "CUDA_CACHE_PATH")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    presets = ", ".join(PRESETS)
    parser.add_argument("--model", default="", help="as penstock's --model; several between commas")
    parser.add_argument("--precision", default="", help="bf16, fp8, fp32, …; several between commas")
    parser.add_argument("--cells", default="", help=f"256x512x256, 16x4096, 64x~1024x128, or {presets}; between commas")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--peer", default="", help=f"folder with vLLM, or {INSTALLED!r}: measure it, too")
    parser.add_argument("--peer-only", action="store_true")
    parser.add_argument("--starts", default="", help="cold,warm: also time whole starts, without and with compiled kernels")
    parser.add_argument("--repeat", type=int, default=2, help="the least of so many times counts")
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--max-rows", type=int, default=512)
    parser.add_argument("--limit-s", type=float, default=0.0, help="end each process after so long; what it had said counts")
    parser.add_argument("--kv-gb", type=float, default=0.0, help="GiB of KV on either side; 0: what the card has")
    parser.add_argument("--gate", type=Path, help="a file to wait for before anything is measured (bench/engine/gate.py)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of our engine's")
    parser.add_argument("--out", type=Path, default=Path("build/bench-engine"))
    options = parser.parse_args(argv)
    if options.device == "auto":
        options.device = "cuda" if describe().gpus else "cpu"
    on_cpu = options.device == "cpu"
    options.model = options.model or (DEFAULT_MODEL if on_cpu else "dummy:llama-3.1-8b")
    options.precision = options.precision or ("auto" if on_cpu else "bf16,fp8")
    try:
        options.cells = parse_cells(options.cells or ("cpu" if on_cpu else "decode,prefill"))
    except ValueError as error:
        parser.error(str(error))
    return options


def ours(options: argparse.Namespace, model: str, precision: str, cells: Sequence[Cell], environment: dict[str, str]) -> Side:
    flags = [f"--model={model}", f"--precision={precision}", f"--device={options.device}", f"--repeat={options.repeat}"]
    flags += [f"--cells={','.join(map(str, cells))}", f"--token-budget={options.token_budget}"]
    flags += [f"--max-rows={options.max_rows}", f"--begun-at={time.time()}", *(f"--set={pair}" for pair in options.set)]
    if options.kv_gb:
        flags.append(f"--set=kv_cache_mb={int(options.kv_gb * 1024)}")
    return _measure([sys.executable, "-m", "bench.engine.measure", *flags], environment, options.limit_s)


def peer(options: argparse.Namespace, model: str, precision: str) -> Side:
    with tempfile.TemporaryDirectory(prefix="penstock-peer-") as folder:
        config = hugging_face_config(resolve(model))
        (Path(folder) / "config.json").write_bytes(msgspec.json.encode(config))
        flags = [f"--folder={folder}", f"--precision={precision}", f"--cells={','.join(map(str, options.cells))}"]
        flags += [f"--repeat={options.repeat}", f"--token-budget={options.token_budget}", f"--max-rows={options.max_rows}"]
        flags += [f"--kv-gb={options.kv_gb}", *([f"--gate={options.gate}"] if options.gate else [])]
        environment = dict(os.environ)
        if options.peer != INSTALLED:
            environment["PYTHONPATH"] = os.pathsep.join([options.peer, str(ROOT), environment.get("PYTHONPATH", "")])
        return _measure(
            [sys.executable, "-m", "bench.peer.vllm_cells", *flags], environment, 0.0 if options.gate else options.limit_s
        )


def starts(options: argparse.Namespace, model: str, precision: str) -> list[Start]:
    """A start with caches in an empty folder, and one more with what the first left there."""
    found = []
    with tempfile.TemporaryDirectory(prefix="penstock-start-") as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in CACHES}
        for kind in options.starts.split(","):
            side = ours(options, model, precision, [], os.environ | caches)
            if opened := side.opened():
                found.append(Start(kind=kind, opened=opened))
            else:
                print(f"bench.engine: the {kind} start failed: {side.error or side.lines}", file=sys.stderr)
    return found


def _measure(command: Sequence[str], environment: dict[str, str], limit_s: float) -> Side:
    side = Side()

    def take(text: bytes) -> None:
        line = decode_line(text)
        if line is not None:
            side.lines.append(line)
            print(f"  {text.decode().strip()[:200]}", file=sys.stderr)

    begun = time.monotonic()
    side.error = run_child(command, take, environment=environment, limit_s=limit_s)
    side.seconds = time.monotonic() - begun
    return side


def write(report: Report, out: Path) -> None:
    """After everything that takes long: what comes later may run out of time."""
    write_json(out / "engine.json", report)
    (out / "engine.md").write_text(render(report) + "\n")


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    report = Report(machine=describe(), command=shlex.join(["python", "-m", "bench.engine", *argv]))
    goals = load_goals()
    failed = False
    for model in options.model.split(","):
        for precision in options.precision.split(","):
            print(f"{model}, {precision}", file=sys.stderr)
            part = Part(model=model, precision=precision, ours=Side())
            report.parts.append(part)
            if options.peer:
                try:
                    part.peer = peer(options, model, precision)
                except PenstockError as error:
                    part.peer = Side(error=str(error))
                write(report, options.out)
            if options.gate:  # without a peer, or with one that failed, nobody has waited
                gate.arrive(options.gate)
                gate.wait(options.gate)
            if not options.peer_only:
                part.starts = starts(options, model, precision) if options.starts else []
                write(report, options.out)
                part.ours = ours(options, model, precision, options.cells, dict(os.environ))
                failed = failed or not part.ours.measured()
            opened = part.ours.opened()
            device = opened.device if opened else " ".join(report.machine.gpus)
            part.goals = find(goals, device=device, model=model, precision=precision)
            print(render_part(part), end="\n\n", flush=True)
            write(report, options.out)
    drawn = draw(report, options.out / "engine.png")
    print(f"{report.machine}\nwritten to {options.out}: engine.md, engine.json{', engine.png' if drawn else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
