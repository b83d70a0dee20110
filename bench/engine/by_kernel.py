"""Where the time of a cell goes, by kernel: `python -m bench.engine.by_kernel`.

    python -m bench.engine.by_kernel --model dummy:llama-3.1-8b --precision bf16 --cells 1x8192,16x4096,64x~900
    PYTHONPATH=SITE python -m bench.engine.by_kernel --peer-folder FOLDER --cells …      vLLM (see bench/peer/README.md)
    python -m bench.engine.by_kernel --model dummy:tiny --precision fp32 --device cpu --cells 2x64x8       operators, in small

Each cell runs once before, then a few times alone, of which the median is "alone", then once in torch's profiler, which slows
it down. "all": of the kernels; for the rest of the time in the profiler nothing ran. Kernels of both sides that compute the
same have different names; on Hopper products of torch's library begin with "nvjet". vLLM runs in this process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench.common.machine import describe
from bench.common.table import markdown, number, percent
from bench.engine.cells import Cell, parse_cells
from bench.engine.measure import Measurement, settings_of
from bench.engine.opening import PRECISIONS, open_runner
from bench.peer import vllm_cells
from common.runtime import parent_death

TIMES = 3
NAME_CHARACTERS = 90
PEER_KV_GB = 12.0

Seconds = Callable[[Cell], float]
"""Runs a cell, and says how long it took."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.by_kernel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--peer-folder", default="", help="measure vLLM instead; the folder holds a config.json")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="bf16")
    parser.add_argument("--cells", type=parse_cells, default=parse_cells("1x8192,16x4096,64x~900"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kernels", type=int, default=14, help="as many as a table has")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of our engine's")
    return parser.parse_args(argv)


def ours(options: argparse.Namespace) -> Seconds:
    settings = {"device": options.device, "max_running": 512, "token_budget": 16384} | settings_of(options.set)
    if options.device == "cpu":
        settings.setdefault("num_blocks", 4096)
    measurement = Measurement(open_runner(options.model, options.precision, **settings), token_budget=16384, max_rows=512)
    return lambda cell: measurement.generate(cell.lengths(), cell.out).seconds


def theirs(options: argparse.Namespace) -> Seconds:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the profiler sees one process
    for name, value in vllm_cells.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    flags = [f"--folder={options.peer_folder}", f"--precision={options.precision}", f"--kv-gb={PEER_KV_GB}"]
    peer = vllm_cells.Peer(vllm_cells.parse([*flags, f"--cells={','.join(map(str, options.cells))}"]))
    return lambda cell: peer.seconds(cell.lengths(), cell.out)


def table_of(name: object, run: Callable[[], float], count: int) -> str:
    """Markdown: the `count` kernels that took longest, then all of them. run: returns the seconds that it took."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_card = torch.cuda.is_available()
    run()
    alone = statistics.median(run() for _ in range(TIMES))
    with profile(activities=[ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU]) as profiler:
        profiled = run()

    def spent_us(event: Any) -> float:
        return event.self_device_time_total if on_card else event.self_cpu_time_total

    events = sorted(profiler.key_averages(), key=spent_us, reverse=True)
    total_us = sum(map(spent_us, events))
    rows = [
        [
            number(spent_us(event) / 1e3, 2),
            percent(spent_us(event), total_us),
            number(event.count),
            number(spent_us(event) / event.count, 1),
            event.key[:NAME_CHARACTERS].replace("|", "/"),
        ]
        for event in events[:count]
    ]
    rows.append([number(total_us / 1e3, 2), percent(1, 1), number(sum(event.count for event in events)), "—", "all"])
    said = f"{name}: {alone * 1e3:.1f} ms alone, {profiled * 1e3:.1f} ms in the profiler"
    return f"{said}\n\n{markdown(['ms', 'share', 'calls', 'µs each', 'kernel'], rows)}\n"


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    seconds = theirs(options) if options.peer_folder else ours(options)
    print(f"{describe()} · {'vLLM' if options.peer_folder else options.model} {options.precision}\n")
    for cell in options.cells:
        print(table_of(cell, partial(seconds, cell), options.kernels), flush=True)
    return 0


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
