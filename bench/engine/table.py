"""The table of the whole engine beside the peer: many models, each in one call with the peer, one GPU each.

    python -m bench.engine.table --peer /tmp/vllm                    every job below, on as many GPUs as there are
    python -m bench.engine.table --peer /tmp/vllm --jobs llama,oss   those whose name holds one of these words
    python -m bench.engine.table --list

A GPU takes one job after the other: `bench.engine` with the job's model, precision and cells; the peer first, then ours.
Each GPU has compilation caches of its own, so that processes do not wait for each other. What a job printed is in
OUT/NAME.log, its table in OUT/NAME/engine.md, and OUT/table.md has all tables so far: it is written after each job, since a
lent machine may go at any time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.common.machine import ROOT, describe

DECODE = "1x512x256,8x512x256,32x512x256,128x512x256,256x512x256"
PREFILL = "1x2048,1x8192,16x4096"
LONG = "1x32768,4x12288,200x~900,48x~4096,2x65536x256,8x32768x256"
SHORT = "8x512x256,128x512x256,1x2048,16x4096"


CACHES = ("TRITON_CACHE_DIR", "PENSTOCK_KERNEL_CACHE", "VLLM_CACHE_ROOT")


class Job(NamedTuple):
    """`set`: settings of our engine (`NAME=VALUE`). `peer`: whether the peer is measured, too."""

    name: str
    model: str
    precision: str
    cells: str
    settings: tuple[str, ...] = ()
    peer: bool = True


JOBS = (
    Job("gpt-oss-20b", "dummy:gpt-oss-20b", "auto", f"{DECODE},{PREFILL}"),
    Job("gpt-oss-120b", "dummy:gpt-oss-120b", "auto", f"{DECODE},{PREFILL}"),
    Job("qwen3-30b-a3b-fp8", "dummy:qwen3-30b-a3b-fp8", "auto", f"{DECODE},{PREFILL}"),
    Job("qwen3-30b-a3b", "dummy:qwen3-30b-a3b", "auto", f"{DECODE},{PREFILL}"),
    Job("llama-8b-awq", "dummy:llama-3.1-8b-awq", "auto", f"{DECODE},{PREFILL}"),
    Job("llama-8b", "dummy:llama-3.1-8b", "bf16", f"{DECODE},{PREFILL}"),
    Job("llama-8b-fp8", "dummy:llama-3.1-8b", "fp8", f"{DECODE},{PREFILL}"),
    Job("llama-8b-long", "dummy:llama-3.1-8b", "bf16", LONG),
    Job("llama-8b-fp8-long", "dummy:llama-3.1-8b", "fp8", LONG),
    Job("qwen3-235b-8-layers", "dummy:qwen3-235b-a22b-8-layers", "auto", SHORT),
    Job("mixtral", "dummy:mixtral-8x7b", "auto", SHORT),
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
    return [sys.executable, "-u", "-m", "bench.engine", *flags]


def environment_of(gpu: int, out: Path) -> dict[str, str]:
    caches = {name: str(out / f"cache-{gpu}" / name.lower()) for name in CACHES}
    # the peer's FP8 blocks otherwise want a library's sources, which its packages lack
    return os.environ | caches | {"CUDA_VISIBLE_DEVICES": str(gpu), "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}


class Board:
    """What GPUs take jobs from and where results go; its methods may be called from any thread."""

    def __init__(self, jobs: list[Job], options: argparse.Namespace) -> None:
        self.waiting = list(jobs)
        self.options = options
        self.lock = threading.Lock()
        self.lines: list[str] = []
        self.ended: list[Job] = []

    def work(self, gpu: int) -> None:
        environment = environment_of(gpu, self.options.out)
        while True:
            with self.lock:
                if not self.waiting:
                    return
                job = self.waiting.pop(0)
            begun = time.monotonic()
            with (self.options.out / f"{job.name}.log").open("w") as log:
                code = subprocess.call(
                    command_of(job, self.options), stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
                )
            with self.lock:
                self.ended.append(job)
                self.lines.append(f"- {job.name}: GPU {gpu}, {time.monotonic() - begun:.0f} s, exit code {code}")
                print(self.lines[-1], flush=True)
                self.write()

    def write(self) -> None:
        texts = [f"# {describe()}", *self.lines]
        for job in self.ended:
            table = self.options.out / job.name / "engine.md"
            texts += ["", f"## {job.name}", "", table.read_text() if table.exists() else "no table: see the log"]
        (self.options.out / "table.md").write_text("\n".join(texts) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    jobs = chosen(options.jobs, options.exactly)
    if options.list or not jobs:
        print("\n".join(f"{job.name}: {job.model}, {job.precision}, {job.cells}" for job in jobs or JOBS))
        return 0 if options.list else 2
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    board = Board(jobs, options)
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
