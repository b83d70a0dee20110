"""Linears of 4- and 8-bit weights beside bf16, on a GPU: `python -m bench.engine.quantised`.

First kernels for few and many rows are compared with the float32 product of the dequantised weight, for each code and group.
Then the four linears of a layer are timed in each format, as they run when served: the fastest candidate, in a CUDA graph, with
the weight not in L2. Each figure stands beside the time that reading the weight's bytes takes.

    python -m bench.engine.quantised                                  bf16, FP8, INT4 (group 128), NVFP4 at 1 … 2048 rows
    python -m bench.engine.quantised --formats plain,nf4/64 --rows 1,16
    python -m bench.engine.quantised --check-only

Ends with 1 if a kernel is wrong. The last table is in Markdown.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from bench.common.table import markdown
from common.models.shapes import SHAPES
from common.ops import backend
from common.ops.kept import CACHE_VARIABLE
from common.ops.linear import device as linear_device
from common.ops.linear.candidates import Candidate, Kind, Op
from common.ops.linear.linear_tuning import LinearShape, tune_linears
from common.ops.linear.reference import linear_grouped_reference
from common.ops.linear.weight import LinearWeight, Role, linear_from_grouped
from common.ops.quant.group_layout import Code
from common.ops.quant.grouped import pack_grouped
from common.runtime import parent_death

BYTES_PER_S = 4.24e12
"""Of an H200, measured as a device copy."""
NAMES = {
    "plain": "bf16",
    "fp8": "FP8",
    "int4/128": "INT4 g128",
    "int4/128+offsets": "INT4 g128, zeros",
    "int4/32": "INT4 g32",
    "fp4/16": "NVFP4",
    "fp4/32": "MXFP4",
    "nf4/64": "NF4",
    "int8/128": "INT8",
    "int8/32": "Q8_0",
    "int8/16": "Q6_K",
    "int4/32+offsets": "Q4_K",
}
CHECKED: tuple[tuple[Code, int, bool], ...] = (
    ("int4", 128, False),
    ("int4", 128, True),
    ("int4", 32, False),
    ("int4", 32, True),
    ("fp4", 16, False),
    ("fp4", 32, False),
    ("nf4", 64, False),
    ("int8", 16, False),
    ("int8", 32, False),
    ("int8", 128, False),
)
CASES: tuple[tuple[int, int, int, Op, slice | Kind], ...] = (
    (512, 2048, 1, "linear", slice(2)),
    (328, 1000, 7, "split", slice(1)),
    (512, 2048, 32, "gated", slice(1)),
    (512, 2048, 128, "split", slice(2)),
    (328, 1000, 300, "linear", "library"),
    (512, 2048, 300, "gated", slice(1)),
    (512, 2048, 300, "gated", "unpacking"),
    (328, 1000, 70, "split", "unpacking"),
    (9504, 1792, 7, "gated", "streaming"),
    (9504, 1792, 16, "gated", "streaming"),
    (2080, 4096, 13, "split", "streaming"),
)
"""Outputs, inputs, rows, op, and which of the candidates: by place, or all of a kind."""
MAX_ERROR = 0.06
"""Of a result, in standard deviations of the results: bf16 rounds one between 8 and 16, as gated ones are, by up to 0.031, and
weights that are scaled before the product are rounded, too. Over 14 seeds the largest was 0.045."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.quantised", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--formats", default="plain,int4/128,fp4/16,fp8", help=f"of {', '.join(NAMES)}; between commas")
    parser.add_argument("--rows", default="1,8,32,128,2048", help="between commas")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    options = parser.parse_args(argv)
    options.formats = options.formats.split(",")
    options.rows = [int(rows) for rows in options.rows.split(",")]
    if unknown := set(options.formats) - NAMES.keys():
        parser.error(f"no such format: {', '.join(sorted(unknown))}")
    return options


# ── are the kernels right? ───────────────────────────────────────────────────────────────────────────────────────────


def random_weight(code: Code, group: int, offsets: bool, size: int, depth: int, device: torch.device) -> LinearWeight:
    low, high, dtype = (-127, 128, torch.int8) if code == "int8" else (0, 16, torch.uint8)
    codes = torch.randint(low, high, (size, depth), dtype=dtype, device=device)
    groups = -(-depth // group)
    scales = torch.rand(size, groups, device=device) + 0.5
    added = 4 * torch.randn(size, groups, device=device) if offsets else None
    return linear_from_grouped(pack_grouped(codes, scales, added, code=code, group=group))


def check(device: torch.device) -> list[str]:
    """Compare the kernels with the reference, for few rows and many, on the same numbers each time. Returns what is wrong."""
    torch.manual_seed(0)
    jobs: list[tuple[str, Callable[[], float]]] = []
    for code, group, offsets in CHECKED:
        for size, depth, rows, op, which in CASES:
            weight = random_weight(code, group, offsets, size, depth, device)
            assert weight.grouped is not None
            x = torch.randn(rows, depth, device=device).bfloat16()
            meant = linear_grouped_reference(x, weight.grouped, None, torch.float32)
            for chosen in picked(linear_device.options(op, weight, linear_device.bucket(rows), False), which):
                name = f"{linear_device.grouped_name(weight)} {op} {rows}x{size}x{depth} {chosen}"
                jobs.append((name, partial(error_of, op, x, weight, chosen, meant)))
    backend.ready_for_threads()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # most of the time goes into compiling
        found = list(pool.map(lambda job: attempt(*job), jobs))
    print(f"{len(jobs)} kernels, off by {max(error for error, _ in found):.4f} standard deviations at most", flush=True)
    return [said for _, said in found if said]


def picked(candidates: list[Candidate], which: slice | Kind) -> list[Candidate]:
    return candidates[which] if isinstance(which, slice) else [one for one in candidates if one.kind == which]


def attempt(name: str, compute: Callable[[], float]) -> tuple[float, str]:
    """The error, and what is wrong, if something is."""
    torch.cuda.set_device(0)
    try:
        error = compute()
    except Exception as failure:
        return 0.0, f"{name}: {type(failure).__name__}: {str(failure)[:300]}"
    return error, "" if error < MAX_ERROR else f"{name}: off by {error:.3f} standard deviations"


def error_of(op: Op, x: torch.Tensor, weight: LinearWeight, chosen: Candidate, meant: torch.Tensor) -> float:
    """The largest difference from what the product means, in standard deviations of the results."""
    found = linear_device.run(op, x, weight, chosen)
    found = (found.sum(0) if found.ndim == 3 else found).float()
    if op != "gated":
        return ((found - meant).abs() / meant.std()).max().item()
    gates, ups = meant.chunk(2, 1)
    wanted = torch.nn.functional.silu(gates) * ups
    return ((found - wanted).abs() / (wanted.abs() + wanted.std())).max().item()


# ── how fast are they? ───────────────────────────────────────────────────────────────────────────────────────────────


def linears(model: str) -> list[tuple[int, int, Role]]:
    """out, in and role of each linear of a layer."""
    config = SHAPES[model]
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return [
        (queries + 2 * keys, hidden, "qkv"),
        (hidden, queries, "output"),
        (2 * middle, hidden, "gate_up"),
        (hidden, middle, "down"),
    ]


def weight_bytes(kind: str, size: int, depth: int) -> float:
    """Codes and scales of a weight."""
    if kind in ("plain", "fp8"):
        return size * depth * (2 if kind == "plain" else 1)
    code, _, group = kind.partition("+")[0].partition("/")
    scales = 2 * (1 + kind.endswith("+offsets"))
    return size * depth * ((1 if code == "int8" else 0.5) + scales / int(group))


def measure(kind: str, shapes: list[tuple[int, int, Role]], rows: list[int], device: torch.device) -> dict[int, float]:
    """Seconds of a layer's linears, by rows, each with its fastest candidate."""
    total = dict.fromkeys(rows, 0.0)
    for size, depth, role in shapes:
        shape: LinearShape = (kind, size, depth, role)
        tuned = tune_linears([shape], dtype=torch.bfloat16, device=device, buckets=rows)
        for name, why in list(tuned.failed.items())[:3]:
            print(f"    failed: {name}: {why[:200]}", flush=True)
        for count in rows:
            times = {
                candidate: seconds
                for key, found in tuned.seconds.items()
                if key.endswith(f" {count}")
                for candidate, seconds in found.items()
            }
            best = min(times, key=lambda candidate: times[candidate])
            total[count] += times[best]
            limit = weight_bytes(kind, size, depth) / BYTES_PER_S
            said = f"{best.kind} {best.block_n}x{best.block_m} splits {best.splits} warps {best.warps} stages {best.stages}"
            print(
                f"    {NAMES[kind]} {role} {count}: {times[best] * 1e6:.1f} us (bytes {limit * 1e6:.1f}), {said} {best.scaled}",
                flush=True,
            )
    return total


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if not torch.cuda.is_available():
        print("bench.engine.quantised needs a GPU", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="penstock-quantised-")  # measure anew
    begun = time.monotonic()
    problems = [] if options.no_check else check(device)
    print(f"checked in {time.monotonic() - begun:.0f} s", flush=True)
    for problem in problems[:20]:
        print(f"  {problem}")
    if len(problems) > 20:
        print(f"  and {len(problems) - 20} more")
    if options.check_only:
        return 1 if problems else 0
    shapes = linears(options.model)
    found: dict[str, dict[int, float]] = {}
    for kind in options.formats:
        found[kind] = measure(kind, shapes, options.rows, device)
        figures = ", ".join(f"{rows} rows {seconds * 1e6:.1f} us" for rows, seconds in found[kind].items())
        print(f"  {NAMES[kind]}: {figures}; {time.monotonic() - begun:.0f} s", flush=True)
    print(f"\n{options.model}, the four linears of a layer, µs (byte limit; times as fast as {NAMES[options.formats[0]]})\n")
    lines: list[list[str]] = []
    for rows in options.rows:
        first = found[options.formats[0]][rows]
        line = [str(rows)]
        for kind in options.formats:
            limit = sum(weight_bytes(kind, size, depth) for size, depth, _ in shapes) / BYTES_PER_S
            line.append(f"{found[kind][rows] * 1e6:.1f} ({limit * 1e6:.1f}; {first / found[kind][rows]:.2f}×)")
        lines.append(line)
    print(markdown(["rows", *(NAMES[kind] for kind in options.formats)], lines))
    print(f"\n{torch.cuda.get_device_name(device)}; {len(problems)} kernels wrong; {time.monotonic() - begun:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
