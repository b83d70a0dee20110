"""Check a mixture of experts on this machine's GPU against plain torch, then time it beside the limit.

    python -m bench.engine.moe --shape gpt-oss-120b --format mxfp4 --rows 1 8 32 128 256 4096

The limit is the larger of two times: reading the weights of the experts that have tokens at --bytes-per-s, and the
multiplications at --flops. The defaults were measured on an H200. A call sorts, multiplies and combines; it does not route.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NamedTuple

import torch

from common.ops.moe.experts_reference import experts_reference
from common.ops.moe.form import ExpertActivation, Routing
from common.ops.moe.grouped_weight import GroupedFormat, GroupedWeight

if TYPE_CHECKING:
    from common.ops.moe.experts_triton import Tiles

CHECKED_ROWS = 8
MAX_ERROR = 0.01
CALLS = 20


class Shape(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: ExpertActivation = ExpertActivation()


SHAPES = {
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, ExpertActivation("clamped_swiglu")),
    "gpt-oss-120b": Shape(128, 4, 2880, 2880, ExpertActivation("clamped_swiglu")),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "qwen3-235b": Shape(128, 8, 4096, 1536),
    "mixtral": Shape(8, 2, 4096, 14336),
}


def swept() -> list[Tiles | None]:
    """Return the tiles to try."""
    from common.ops.moe.experts_triton import Tiles

    return [
        Tiles(m, n, k, warps, stages)
        for m, warps in ((16, 4), (64, 4), (128, 8))
        for n in (32, 64)
        for k in (64, 128)
        for stages in (3, 4)
    ]


def weight(count: int, n: int, k: int, kind: GroupedFormat) -> GroupedWeight:
    """Return random weights whose products have about the size of what goes in."""
    if kind in ("plain", "fp8"):
        dtype = torch.bfloat16 if kind == "plain" else torch.float8_e4m3fn
        values = torch.empty(count, n, k, dtype=dtype, device="cuda")
        for expert in values:
            expert.copy_(torch.randn(n, k, device="cuda") * (k**-0.5 if kind == "plain" else 1.0))
        scale = None if kind == "plain" else torch.full((count, n), k**-0.5, device="cuda")
        return GroupedWeight(values, kind, scale)
    values = torch.randint(256, (count, n, k // 2), dtype=torch.uint8, device="cuda")
    if kind == "mxfp4":
        return GroupedWeight(values, kind, torch.randint(119, 121, (count, n, k // 32), dtype=torch.uint8, device="cuda"))
    return GroupedWeight(values, kind, torch.full((count, n, k // 32), k**-0.5 / 4, dtype=torch.bfloat16, device="cuda"))


def routed(shape: Shape, rows: int, *, skewed: bool) -> Routing:
    """Return random experts for each token, or the same ones for all."""
    ids = torch.rand(1 if skewed else rows, shape.experts, device="cuda").topk(shape.top_k, dim=1).indices.int()
    return Routing(ids.expand(rows, -1).contiguous(), torch.full((rows, shape.top_k), 1 / shape.top_k, device="cuda"))


def error_of(shape: Shape, gate_up: GroupedWeight, down: GroupedWeight, tiles: Tiles | None) -> float:
    """Return the relative error of a few tokens' answers."""
    from common.ops.moe.experts_triton import experts_triton

    x = torch.randn(CHECKED_ROWS, shape.hidden, device="cuda").bfloat16()
    routing = routed(shape, CHECKED_ROWS, skewed=True)
    kept = routing.ids[0].long()
    local = Routing(torch.arange(shape.top_k, device="cuda", dtype=torch.int32).expand(CHECKED_ROWS, -1), routing.weights)
    wholes = [_some(linear, kept).dequantised() for linear in (gate_up, down)]
    expected = experts_reference(x.float(), local, wholes[0], wholes[1], shape.activation)
    found = experts_triton(x, routing, gate_up, down, shape.activation, tiles=tiles).float()
    return float((found - expected).norm() / expected.norm())


def _some(linear: GroupedWeight, kept: torch.Tensor) -> GroupedWeight:
    scale = None if linear.scale is None else linear.scale[kept]
    values = linear.values.view(torch.uint8)[kept].view(linear.values.dtype)
    return GroupedWeight(values, linear.format, scale)


def seconds(shape: Shape, pair: tuple[GroupedWeight, GroupedWeight], rows: int, routing: Routing, tiles: Tiles | None) -> float:
    """Return the time of one call inside a CUDA graph, the L2 cache flushed before each."""
    from common.ops.moe.experts_triton import experts_triton

    x = torch.randn(rows, shape.hidden, device="cuda").bfloat16()
    experts_triton(x, routing, *pair, shape.activation, tiles=tiles)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts_triton(x, routing, *pair, shape.activation, tiles=tiles)
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    for _ in range(CALLS):
        flushed.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1000)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time a mixture of experts on a GPU.")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["gpt-oss-120b"])
    parser.add_argument("--format", choices=("plain", "fp8", "mxfp4", "int4"), nargs="+", default=["mxfp4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 256, 4096])
    parser.add_argument("--sweep", action="store_true", help="try all tiles, and show the fastest")
    parser.add_argument("--bytes-per-s", type=float, default=4.05e12)
    parser.add_argument("--flops", type=float, default=751e12)
    given = parser.parse_args()
    torch.manual_seed(0)
    lines, wrong = ["shape format rows routing us limit_us share error tiles"], 0
    for name in given.shape:
        shape = SHAPES[name]
        for kind in given.format:
            gate_up = weight(shape.experts, 2 * shape.intermediate, shape.hidden, kind)
            down = weight(shape.experts, shape.hidden, shape.intermediate, kind)
            stored = sum(t.nbytes for linear in (gate_up, down) for t in (linear.values, linear.scale) if t is not None)
            tried = swept() if given.sweep else [None]
            errors = {tiles: error_of(shape, gate_up, down, tiles) for tiles in tried}
            wrong += sum(not error < MAX_ERROR for error in errors.values())
            for rows in given.rows:
                for skewed in (False, True):
                    routing = routed(shape, rows, skewed=skewed)
                    timed = {tiles: seconds(shape, (gate_up, down), rows, routing, tiles) for tiles in tried}
                    best = min(timed, key=lambda tiles: timed[tiles])
                    memory = routing.ids.unique().numel() * stored / shape.experts / given.bytes_per_s
                    limit = max(memory, 6 * rows * shape.top_k * shape.hidden * shape.intermediate / given.flops)
                    figures = f"{timed[best] * 1e6:.1f} {limit * 1e6:.1f} {limit / timed[best]:.2f} {errors[best]:.4f}"
                    chosen = "default" if best is None else "x".join(map(str, best))
                    lines.append(f"{name} {kind} {rows} {'same' if skewed else 'uniform'} {figures} {chosen}")
    sys.stdout.write("\n".join(lines) + "\n")
    if wrong:
        sys.exit(f"{wrong} choices of tiles are wrong by more than {MAX_ERROR}")


if __name__ == "__main__":
    main()
