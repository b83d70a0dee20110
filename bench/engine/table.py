"""The table of the whole engine beside the peer: many models, each in one call with the peer, one GPU each.

    python -m bench.engine.table --peer /tmp/vllm                    every job below, on as many GPUs as there are
    python -m bench.engine.table --peer /tmp/vllm --jobs llama,oss   those whose name holds one of these words
    python -m bench.engine.table --peer /tmp/vllm --together         as many peers as fit a GPU start at once
    python -m bench.engine.table --compile 3                         compile our kernels for these jobs, three at a time
    python -m bench.engine.table --list

A GPU takes one job after the other: `bench.engine` with the job's model, precision and cells; the peer first, then ours.
Each GPU has compilation caches of its own, so that processes do not wait for each other. What a job printed is in
OUT/NAME.log, its table in OUT/NAME/engine.md, and OUT/table.md has all tables so far: it is written after each job, since a
lent machine may go at any time.

Most of a call is starts: a peer takes two to four minutes for its own. With --together those of several jobs start at the
same time, and nothing is measured before all of them wait; each side has as much KV as its job says. Ours starts when the
job's peer has ended. --compile runs each job's cells on a model of two layers, for the compiled kernels alone: what is fastest
is measured later, on a GPU that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from bench.common.machine import ROOT, describe
from bench.engine import gate

DECODE = "1x512x256,8x512x256,32x512x256,128x512x256,256x512x256"
PREFILL = "1x2048,1x8192,16x4096"
PROMPTS = f"{PREFILL},1x32768,4x12288,200x~900,48x~4096"
LONG = "1x32768,4x12288,200x~900,48x~4096,2x65536x256,8x32768x256"
SHORT = "8x512x256,128x512x256,1x2048,16x4096"

PROCESS_GB = 2.5
"""GiB of a process beside weights and KV: its context, graphs, what a step needs."""
CACHES = ("TRITON_CACHE_DIR", "PENSTOCK_KERNEL_CACHE", "VLLM_CACHE_ROOT")


class Job(NamedTuple):
    """`set`: settings of our engine (`NAME=VALUE`). `peer`: whether the peer is measured, too. `kv_gb`, `weights_gb`: GiB that
    the KV of its longest cell and the weights take."""

    name: str
    model: str
    precision: str
    cells: str
    settings: tuple[str, ...] = ()
    peer: bool = True
    kv_gb: float = 0.0
    weights_gb: float = 0.0


JOBS = (
    Job("gpt-oss-120b", "dummy:gpt-oss-120b", "auto", f"{DECODE},{PREFILL}", kv_gb=12, weights_gb=57),
    Job("gpt-oss-20b", "dummy:gpt-oss-20b", "auto", f"{DECODE},{PREFILL}", kv_gb=8, weights_gb=12.5),
    Job("llama-8b-fp8", "dummy:llama-3.1-8b", "fp8", f"{DECODE},{PREFILL},{LONG}", kv_gb=17, weights_gb=9),
    Job("llama-8b", "dummy:llama-3.1-8b", "bf16", f"{DECODE},{PREFILL},{LONG}", kv_gb=33, weights_gb=15),
    Job("qwen3-30b-a3b-fp8", "dummy:qwen3-30b-a3b-fp8", "auto", f"{DECODE},{PREFILL}", kv_gb=18.5, weights_gb=29),
    Job("llama-8b-awq", "dummy:llama-3.1-8b-awq", "auto", f"{DECODE},{PREFILL}", kv_gb=24.5, weights_gb=5.5),
    Job("qwen3-30b-a3b", "dummy:qwen3-30b-a3b", "auto", f"{DECODE},{PREFILL}", kv_gb=18.5, weights_gb=57),
    Job("qwen3-235b-8-layers", "dummy:qwen3-235b-a22b-8-layers", "auto", SHORT, kv_gb=3, weights_gb=21),
    Job("mixtral", "dummy:mixtral-8x7b", "auto", SHORT, kv_gb=13, weights_gb=87),
    Job("mixtral-8-layers", "dummy:mixtral-8x7b-8-layers", "auto", SHORT, kv_gb=4, weights_gb=22.5),
    Job("llama-8b-uniform", "dummy:llama-3.1-8b-uniform", "bf16", PROMPTS, kv_gb=33, weights_gb=15),
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", default="", help="as bench.engine's; without it ours alone")
    parser.add_argument("--jobs", default="", help="words between commas: jobs whose name holds one of them; all without")
    parser.add_argument("--exactly", action="store_true", help="--jobs are whole names")
    parser.add_argument("--gpus", type=int, default=0, help="how many take jobs; 0: all")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="start the peers of several jobs at once")
    parser.add_argument("--room-gb", type=float, default=133.0, help="GiB of a GPU that jobs together may take")
    parser.add_argument("--ready-s", type=float, default=400.0, help="what is measured waits so long for peers that start")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="only compile, N processes at a time")
    parser.add_argument("--limit-s", type=float, default=330.0, help="seconds for each side of a job")
    parser.add_argument("--out", type=Path, default=Path("build/bench-table"))
    parser.add_argument("--list", action="store_true")
    return parser.parse_args(argv)


def chosen(words: str, exactly: bool) -> list[Job]:
    """In the order of the words, then of JOBS, so that what matters most can come first."""
    if not words:
        return list(JOBS)
    found: dict[str, Job] = {}
    for word in words.split(","):
        for job in JOBS:
            if job.name == word or (not exactly and word in job.name):
                found.setdefault(job.name, job)
    return list(found.values())


def command_of(job: Job, options: argparse.Namespace) -> list[str]:
    flags = [f"--model={job.model}", f"--precision={job.precision}", f"--cells={job.cells}", f"--repeat={options.repeat}"]
    flags += [f"--limit-s={options.limit_s}", f"--out={options.out / job.name}", *(f"--set={pair}" for pair in job.settings)]
    if options.peer and job.peer:
        flags.append(f"--peer={options.peer}")
    if options.together:
        flags += [f"--kv-gb={job.kv_gb}", f"--gate={gate_of(job, options)}"]
    return [sys.executable, "-u", "-m", "bench.engine", *flags]


def compile_command_of(job: Job) -> list[str]:
    """Its cells once, with two layers: KV of two layers of a hundred or so is little."""
    model = job.model.removesuffix("-uniform").removesuffix("-8-layers")
    flags = [f"--model={model}-2-layers", f"--precision={job.precision}", f"--cells={job.cells}"]
    flags += ["--repeat=1", "--no-ceilings", "--set=kv_cache_mb=4096", *(f"--set={pair}" for pair in job.settings)]
    return [sys.executable, "-u", "-m", "bench.engine.measure", *flags]


def gate_of(job: Job, options: argparse.Namespace) -> Path:
    return options.out / f"{job.name}.gate"


def environment_of(gpu: int, out: Path) -> dict[str, str]:
    caches = {name: str(out / f"cache-{gpu}" / name.lower()) for name in CACHES}
    # the peer's FP8 blocks otherwise want a library's sources, which its packages lack
    return os.environ | caches | {"CUDA_VISIBLE_DEVICES": str(gpu), "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}


def groups_of(jobs: Sequence[Job], room_gb: float) -> list[list[Job]]:
    """Jobs in their order, as many together as `room_gb` GiB hold beside each other; one that is too large is alone."""
    groups: list[list[Job]] = []
    left = 0.0
    for job in jobs:
        needed = job.kv_gb + job.weights_gb + PROCESS_GB
        if not groups or needed > left:
            groups.append([])
            left = room_gb
        groups[-1].append(job)
        left -= needed
    return groups


class Board:
    """What GPUs take jobs from and where results go; its methods may be called from any thread."""

    def __init__(self, groups: list[list[Job]], options: argparse.Namespace) -> None:
        self.waiting = deque(groups)
        self.options = options
        self.lock = threading.Lock()
        self.lines: list[str] = []
        self.ended: list[Job] = []

    def work(self, gpu: int) -> None:
        while True:
            with self.lock:
                if not self.waiting:
                    return
                group = self.waiting.popleft()
            self.measure(group, gpu)

    def measure(self, group: list[Job], gpu: int) -> None:
        environment, begun = environment_of(gpu, self.options.out), time.monotonic()
        processes: list[subprocess.Popen[Any]] = []
        for job in group:
            with (self.options.out / f"{job.name}.log").open("w") as log:
                settings: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment, "cwd": ROOT}
                processes.append(subprocess.Popen(command_of(job, self.options), **settings))
        if self.options.together:
            self.await_all(group, processes)
            self.say(f"- {', '.join(job.name for job in group)}: ready after {time.monotonic() - begun:.0f} s")
        for job, process in zip(group, processes, strict=True):
            begun = time.monotonic()
            if self.options.together:
                gate.release(gate_of(job, self.options))
            code = process.wait()
            with self.lock:
                self.ended.append(job)
            self.say(f"- {job.name}: GPU {gpu}, {time.monotonic() - begun:.0f} s, exit code {code}")

    def await_all(self, group: list[Job], processes: Sequence[subprocess.Popen[Any]]) -> None:
        gates = [gate_of(job, self.options) for job in group]
        late = time.monotonic() + self.options.ready_s
        while time.monotonic() < late:
            pairs = zip(gates, processes, strict=True)
            if all(gate.has_arrived(one) or process.poll() is not None for one, process in pairs):
                return
            time.sleep(0.1)
        self.say(f"- not every peer was ready after {self.options.ready_s:.0f} s")

    def say(self, line: str) -> None:
        with self.lock:
            self.lines.append(line)
            print(line, flush=True)
            self.write()

    def write(self) -> None:
        texts = [f"# {describe()}", *self.lines]
        for job in self.ended:
            table = self.options.out / job.name / "engine.md"
            texts += ["", f"## {job.name}", "", table.read_text() if table.exists() else "no table: see the log"]
        (self.options.out / "table.md").write_text("\n".join(texts) + "\n")


def compile_kernels(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """Fill GPU 0's cache of compiled kernels, `options.compile` processes at a time; what they measure is thrown away."""
    environment = environment_of(0, options.out) | {"PENSTOCK_KERNEL_CACHE": str(options.out / "cache-compile")}

    def run(job: Job) -> None:
        begun = time.monotonic()
        with (options.out / f"{job.name}.compile.log").open("w") as log:
            command = compile_command_of(job)
            code = subprocess.call(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        print(f"{job.name}: compiled in {time.monotonic() - begun:.0f} s, exit code {code}", flush=True)

    with ThreadPoolExecutor(options.compile) as pool:
        list(pool.map(run, jobs))


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    jobs = chosen(options.jobs, options.exactly)
    if options.list or not jobs:
        print("\n".join(f"{job.name}: {job.model}, {job.precision}, {job.cells}" for job in jobs or JOBS))
        return 0 if options.list else 2
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.compile:
        compile_kernels(jobs, options)
        return 0
    for job in jobs:
        gate.clear(gate_of(job, options))
    board = Board(groups_of(jobs, options.room_gb if options.together else 0.0), options)
    gpus = options.gpus or max(1, len(describe().gpus))
    threads = [threading.Thread(target=board.work, args=(gpu,)) for gpu in range(gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print((options.out / "table.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
