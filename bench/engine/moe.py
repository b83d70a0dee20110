"""Check a mixture of experts on this machine's GPU against plain torch, then time it beside its limit.

    python -m bench.engine.moe --shape gpt-oss-120b --format mxfp4 --rows 1 8 32 128 256 4096
    python -m bench.engine.moe --tune --baseline        first measure which kernels to use, as loading a model does
    python -m bench.engine.moe --sweep                  a line for each candidate

The limit is the larger of two times: reading the weights of the experts that have tokens at --bytes-per-s, and the
multiplications at --flops. The defaults were measured on an H200. A call sorts, multiplies and combines; it does not route.
Calls to be compared, with --baseline those of a plain implementation too, take turns, in CUDA graphs, and each finds the L2
cache flushed; the figures are medians.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.ops.moe import device as experts_device
from common.ops.moe.candidates import ExpertCandidate, bucket
from common.ops.moe.experts_reference import experts_reference
from common.ops.moe.experts_tuning import BUDGET_S, TunedExperts, tune_experts, uniform_routing
from common.ops.moe.form import ExpertActivation, ExpertWeights, Routing
from common.ops.moe.grouped_weight import GroupedWeight
from common.ops.moe.packed_layout import GroupedFormat

CHECKED_ROWS = 8
MAX_ERROR = 0.01
MAX_QUANTISED_ERROR = 0.05
CALLS = 20
FORMATS = ("plain", "fp8", "fp8_blocks", "mxfp4", "int4")

Call = Callable[[torch.Tensor, Routing], torch.Tensor]


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


@dataclass(frozen=True, slots=True)
class Layer:
    """Random weights of a shape, as they are published and as the kernels read them."""

    shape: Shape
    gate_up: GroupedWeight
    down: GroupedWeight
    packed: ExpertWeights

    def call(self, chosen: ExpertCandidate) -> Call:
        from common.ops.moe.experts_triton import experts_triton  # needs Triton, which --help does not

        assert self.packed.on_gpu is not None
        gate_up, down = self.packed.on_gpu
        return lambda x, routing: experts_triton(x, routing, gate_up, down, self.shape.activation, chosen)

    def baseline(self) -> Call:
        from bench.engine.moe_baseline import experts_baseline

        return lambda x, routing: experts_baseline(x, routing, self.gate_up, self.down, self.shape.activation)

    @property
    def expert_bytes(self) -> float:
        assert self.packed.on_gpu is not None
        return sum(weight.nbytes for weight in self.packed.on_gpu) / self.shape.experts


def layer_of(shape: Shape, kind: str) -> Layer:
    gate_up = weight(shape.experts, 2 * shape.intermediate, shape.hidden, kind)
    down = weight(shape.experts, shape.hidden, shape.intermediate, kind)
    return Layer(shape, gate_up, down, ExpertWeights.grouped(gate_up, down))


def weight(count: int, n: int, k: int, name: str) -> GroupedWeight:
    """Return random weights whose products have about the size of what goes in."""
    kind: GroupedFormat = "plain" if name == "plain" else "mxfp4" if name == "mxfp4" else "int4" if name == "int4" else "fp8"
    if kind in ("plain", "fp8"):
        dtype = torch.bfloat16 if kind == "plain" else torch.float8_e4m3fn
        values = torch.empty(count, n, k, dtype=dtype, device="cuda")
        for expert in values:
            expert.copy_(torch.randn(n, k, device="cuda") * (k**-0.5 if kind == "plain" else 1.0))
        if kind == "plain":
            return GroupedWeight(values)
        size = (count, -(-n // 128), -(-k // 128)) if name == "fp8_blocks" else (count, n)
        return GroupedWeight(values, kind, (0.5 + torch.rand(size, device="cuda")) * k**-0.5)
    values = torch.randint(256, (count, n, k // 2), dtype=torch.uint8, device="cuda")
    if kind == "mxfp4":
        return GroupedWeight(values, kind, torch.randint(119, 121, (count, n, k // 32), dtype=torch.uint8, device="cuda"))
    group = 128 if k % 128 == 0 else 32
    return GroupedWeight(values, kind, torch.full((count, n, k // group), k**-0.5 / 4, dtype=torch.bfloat16, device="cuda"))


def routed(shape: Shape, rows: int, *, skewed: bool) -> Routing:
    """Return random experts for each token, or the same ones for all."""
    found = uniform_routing(shape.experts, shape.top_k, 1 if skewed else rows, torch.device("cuda"))
    return Routing(*(tensor.expand(rows, -1).contiguous() for tensor in found)) if skewed else found


def error_of(layer: Layer, call: Call, rows: int) -> float:
    """Return the relative error of tokens' answers, all routed to the same experts, whose weights alone are dequantised."""
    shape = layer.shape
    x = torch.randn(rows, shape.hidden, device="cuda").bfloat16()
    routing = routed(shape, rows, skewed=True)
    kept = routing.ids[0].long()
    checked = x[:: max(1, rows // CHECKED_ROWS)]
    ids = torch.arange(shape.top_k, device="cuda", dtype=torch.int32).expand(len(checked), -1)
    local = Routing(ids, routing.weights[: len(checked)])
    wholes = [_some(linear, kept).dequantised() for linear in (layer.gate_up, layer.down)]
    expected = experts_reference(checked.float(), local, wholes[0], wholes[1], shape.activation)
    found = call(x, routing)[:: max(1, rows // CHECKED_ROWS)].float()
    return float((found - expected).norm() / expected.norm())


def _some(linear: GroupedWeight, kept: torch.Tensor) -> GroupedWeight:
    scale = None if linear.scale is None else linear.scale[kept]
    values = linear.values.view(torch.uint8)[kept].view(linear.values.dtype)
    return GroupedWeight(values, linear.format, scale)


def medians(calls: list[Call], x: torch.Tensor, routing: Routing) -> list[float]:
    """Return the seconds of each call inside a CUDA graph. Calls take turns; the L2 cache is flushed before each."""
    graphs: list[torch.cuda.CUDAGraph] = []
    for call in calls:
        call(x, routing)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(x, routing)
        graphs.append(graph)
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(CALLS):
        for graph, found in zip(graphs, times, strict=True):
            flushed.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            found.append(start.elapsed_time(stop) / 1000)
    return [sorted(found)[len(found) // 2] for found in times]


def limit_s(layer: Layer, routing: Routing, bytes_per_s: float, flops: float) -> float:
    shape = layer.shape
    memory = routing.ids.unique().numel() * layer.expert_bytes / bytes_per_s
    return max(memory, 6 * len(routing.ids) * shape.top_k * shape.hidden * shape.intermediate / flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["gpt-oss-120b"])
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=["mxfp4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 256, 4096])
    parser.add_argument("--tune", action="store_true", help="measure first which kernels to use, and keep the table")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds of --tune for a shape and format")
    parser.add_argument("--baseline", action="store_true", help="time the plain implementation in turns with it")
    parser.add_argument("--sweep", action="store_true", help="a line for each candidate, not only the chosen one")
    parser.add_argument("--bytes-per-s", type=float, default=4.05e12)
    parser.add_argument("--flops", type=float, default=751e12)
    given = parser.parse_args()
    torch.manual_seed(0)
    sys.stdout.write("shape format rows routing us limit_us share baseline_us error candidate\n")
    wrong = 0
    for name in given.shape:
        for kind in given.format:
            layer = layer_of(SHAPES[name], kind)
            if given.tune:
                sys.stdout.write(f"# {name} {kind}: {_tuned(layer, given.budget_s)}\n")
            for rows in given.rows:
                wrong += _lines(f"{name} {kind} {rows}", layer, rows, given)
            del layer
    if wrong:
        sys.exit(f"{wrong} candidates are wrong by more than {MAX_ERROR} ({MAX_QUANTISED_ERROR} with quantised activations)")


def _tuned(layer: Layer, budget_s: float) -> str:
    assert layer.packed.on_gpu is not None
    begun = time.perf_counter()
    case = TunedExperts(*layer.packed.on_gpu, layer.shape.activation, layer.shape.top_k, torch.bfloat16)
    tuned = tune_experts([case], budget_s=budget_s)
    failed = "".join(f"\n#   {name}: {error}" for name, error in tuned.failed.items())
    return f"{len(tuned.seconds)} buckets measured in {time.perf_counter() - begun:.1f} s of {budget_s:.0f}{failed}"


def _lines(title: str, layer: Layer, rows: int, given: argparse.Namespace) -> int:
    """Write the lines of a number of rows. Returns how many candidates are wrong."""
    assert layer.packed.on_gpu is not None
    gate_up, shape = layer.packed.on_gpu[0], layer.shape
    chosen = [experts_device.choose(gate_up, shape.activation, rows, shape.top_k)]
    if given.sweep:
        chosen = experts_device.options(gate_up, bucket(rows), shape.top_k)
    calls = [layer.call(candidate) for candidate in chosen]
    errors = [error_of(layer, call, rows) for call in calls]
    for skewed in (False, True):
        routing = routed(shape, rows, skewed=skewed)
        x = torch.randn(rows, shape.hidden, device="cuda").bfloat16()
        compared = given.baseline and not gate_up.in_blocks  # which it does not know
        times = medians([*calls, *([layer.baseline()] if compared else [])], x, routing)
        before = f"{times[-1] * 1e6:.1f}" if compared else "-"
        limit = limit_s(layer, routing, given.bytes_per_s, given.flops)
        for candidate, seconds, error in zip(chosen, times, errors, strict=False):
            figures = f"{seconds * 1e6:.1f} {limit * 1e6:.1f} {limit / seconds:.2f} {before} {error:.4f}"
            sys.stdout.write(f"{title} {'same' if skewed else 'uniform'} {figures} {described(candidate)}\n")
    bounds = [MAX_QUANTISED_ERROR if candidate.quantised else MAX_ERROR for candidate in chosen]
    return sum(not error < bound for error, bound in zip(errors, bounds, strict=True))


def described(chosen: ExpertCandidate) -> str:
    sizes = f"{chosen.block_n}x{chosen.block_m}x{chosen.block_k}/{chosen.splits},{chosen.warps}w,{chosen.stages}s"
    flags = [name for name in ("direct", "scaled", "quantised", "library", "halves", "unpacking") if getattr(chosen, name)]
    return "+".join((f"{sizes},{chosen.neighbours}n", *flags))


if __name__ == "__main__":
    main()
