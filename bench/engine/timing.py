"""How long calls take on a device, and what the device can do at most: copy, read, multiply.

On a GPU the calls are captured in one CUDA graph that is replayed: no launch from Python is timed, and calls that take turns
over several buffers (`rotations`) find nothing of the last round in the L2 cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.engine.limits import Ceilings

Call = Callable[[], object]
_MIN_S = 0.02
_REPLAYS = 7
_GRAPH_S = 0.002  # calls are repeated inside a graph up to this long, so that its own launch does not count
_GRAPH_CALLS = 128


def seconds_per_call(calls: Sequence[Call], device: torch.device, *, min_s: float = _MIN_S) -> float:
    """The median over replays of all `calls`, one after the other, by the number of calls."""
    measure = _replayed(calls) if device.type == "cuda" else _called(calls)
    once = measure(1)
    rounds = max(1, min(1000, round(min_s / max(once, 1e-7))))
    return statistics.median(measure(rounds) / rounds for _ in range(_REPLAYS)) / len(calls)


def rotations(size: int, device: torch.device) -> int:
    """How many buffers of `size` bytes it takes that each has left the cache when its turn comes again."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(64, -(-3 * cache // max(size, 1))))


def measure_ceilings(device: torch.device, *, fp8: bool = False) -> Ceilings:
    """Copy and read of 1 GB (a CPU: 256 MB), products of square matrices of 8192 (a CPU: 1024), of random numbers."""
    cuda = device.type == "cuda"
    copy, read = _memory(1 << 30 if cuda else 1 << 28, device)
    side = 8192 if cuda else 1024
    matmul = {name: _matmul(side, getattr(torch, name), device) for name in ("bfloat16", "float32")}
    if fp8:
        matmul["fp8"] = _matmul_fp8(side, device)
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    return Ceilings(device=name, copy=copy, read=read, matmul=matmul)


def _memory(size: int, device: torch.device) -> tuple[float, float]:
    """Bytes per second: copied (read + written), and read."""
    numbers = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(numbers)
    copy_s = seconds_per_call([lambda: target.copy_(numbers)], device)
    return 2 * size / copy_s, size / seconds_per_call([lambda: numbers.sum()], device)


def _matmul(side: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2.0 * side**3 / seconds_per_call([lambda: a @ b], device)


def _matmul_fp8(side: int, device: torch.device) -> float:
    a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    call = lambda: multiply(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
    return 2.0 * side**3 / seconds_per_call([call], device)


def _called(calls: Sequence[Call]) -> Callable[[int], float]:
    for call in calls:
        call()

    def measure(rounds: int) -> float:
        begun = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        return time.perf_counter() - begun

    return measure


def _replayed(calls: Sequence[Call]) -> Callable[[int], float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are compiled and libraries set up outside the capture
        for _ in range(2):
            for call in calls:
                call()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize()
        once = time.perf_counter() - begun
    torch.cuda.current_stream().wait_stream(stream)
    repeats = max(1, min(_GRAPH_CALLS // len(calls), int(_GRAPH_S / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()

    def measure(rounds: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(rounds):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000 / repeats

    return measure
