"""One layer's attention in the cells that long contexts are made of: checked against the reference, then timed.

    python -m bench.engine.attention_cells

The old cut of the work and the new one are timed in turns. Heads are Llama-3.1-8B's. Needs a GPU; nothing is read from disk.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from common.ops.attention.form import AttentionForm
from common.ops.attention.paged_attention import paged_attention
from common.ops.attention.paged_reference import paged_attention_reference
from common.ops.attention.plan_cpu import AttentionRow
from common.ops.attention.settings import AttentionSettings
from common.ops.attention.work import AttentionWorkspace, DevicePlan, plan_device_attention
from common.ops.attention.work_list import DeviceBatch, DeviceRow

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5
EVEN = AttentionSettings()
WAYS = {
    "old": replace(EVEN, is_even=False),
    "even": EVEN,
}

Spans = list[tuple[int, int]]
"""(start, tokens) of each row."""


@dataclass(slots=True, frozen=True)
class Cell:
    name: str
    spans: Spans
    window: int = 0
    has_sinks: bool = False

    @property
    def is_mixed(self) -> bool:
        return any(count > 1 for _, count in self.spans)


def ragged(count: int, mean: int) -> Spans:
    made = torch.Generator().manual_seed(0)
    return [(int(n), 1) for n in torch.randint(mean // 2, mean * 3 // 2, (count,), generator=made)]


CELLS = [
    Cell("8x32768 decode", [(32767, 1)] * 8),
    Cell("2x65536 decode", [(65535, 1)] * 2),
    Cell("3x50000 decode", [(49999, 1)] * 3),
    Cell("48x4096 decode", [(4095, 1)] * 48),
    Cell("128x512 decode", [(511, 1)] * 128),
    Cell("1x128 decode", [(127, 1)]),
    Cell("200 ragged, ~900", ragged(200, 900)),
    Cell("8x32768, window 128 + sinks", [(32767, 1)] * 8, 128, True),
    Cell("8x32768, window 4096 + sinks", [(32767, 1)] * 8, 4096, True),
    Cell("128x512, window 128 + sinks", [(511, 1)] * 128, 128, True),
    Cell("2048 after 24k + 7x32k", [(32767, 1)] * 7 + [(24576, 2048)]),
    Cell("8192 after 24k + 7x32k", [(32767, 1)] * 7 + [(24576, 8192)]),
    Cell("2048 after 24k alone", [(24576, 2048)]),
    Cell("8192 after 24k alone", [(24576, 8192)]),
    Cell("2048 after 24k, window 4096", [(24576, 2048)], 4096, True),
]
CHECKED = [
    Cell("decode", [(999, 1), (0, 1), (5000, 1), (64, 1)]),
    Cell("decode, window 128 + sinks", [(999, 1), (0, 1), (5000, 1), (64, 1)], 128, True),
    Cell("decode, window 1000 + sinks", [(999, 1), (0, 1), (5000, 1), (64, 1)], 1000, True),
    Cell("mixed", [(3000, 1), (700, 1), (2300, 1100)]),
    Cell("mixed, window 128 + sinks", [(3000, 1), (700, 1), (2300, 200)], 128, True),
]


class Device:
    """A pool as the engine has it, block-first, of `layers` layers: each layer's keys lie as far apart as when served."""

    def __init__(self, layers: int, num_blocks: int, dtype: torch.dtype) -> None:
        self.device = torch.device("cuda")
        self.layers = layers
        self.pool = torch.empty(
            num_blocks, layers, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=self.device
        )
        self.pool.normal_()
        if dtype == torch.float8_e4m3fn:
            self.pool = self.pool.to(dtype)
        self.kv_scale = torch.ones(layers, 2, KV_HEADS, device=self.device) if dtype == torch.float8_e4m3fn else None
        self.workspace = AttentionWorkspace(self.device)

    def rows(self, spans: Spans) -> list[AttentionRow]:
        order = torch.randperm(len(self.pool), generator=torch.Generator().manual_seed(1)).tolist()
        rows: list[AttentionRow] = []
        first = at = 0
        for start, count in spans:
            needed = -(-(start + count) // BLOCK_TOKENS)
            rows.append(AttentionRow(first, count, start, [order[(at + i) % len(order)] for i in range(needed)]))
            first, at = first + count, at + needed
        return rows

    def plan(self, cell: Cell, rows: list[AttentionRow], settings: AttentionSettings) -> DevicePlan:
        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        block_starts = list(itertools.accumulate((len(row.blocks) for row in rows[:-1]), initial=0))
        num_tokens = rows[-1].first + rows[-1].length
        batch = DeviceBatch(
            query_starts=ints([*(row.first for row in rows), num_tokens]),
            context_lens=ints([row.start + row.length for row in rows]),
            block_ids=ints([block for row in rows for block in row.blocks]),
            block_starts=ints(block_starts),
            max_queries=max(row.length for row in rows),
            num_tokens=num_tokens,
            rows=[DeviceRow(row.first, row.length, row.start, first) for row, first in zip(rows, block_starts, strict=True)]
            if cell.is_mixed
            else None,
        )
        return plan_device_attention(
            batch, self.pool, HEADS, self.workspace, settings=settings, dtype=torch.bfloat16, form=self.form(cell)
        )

    def form(self, cell: Cell) -> AttentionForm:
        sinks = torch.linspace(-2, 2, HEADS, device=self.device) if cell.has_sinks else None
        return AttentionForm(SCALE, window=cell.window, sinks=sinks)

    def kv_of(self, rows: list[AttentionRow], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's own K and V, as the pool has them."""
        found: list[torch.Tensor] = []
        for which in (0, 1):
            parts: list[torch.Tensor] = []
            for row in rows:
                first = row.start // BLOCK_TOKENS
                ids = torch.tensor(row.blocks[first:], device=self.device)
                held = self.pool.view(torch.uint8) if self.pool.dtype.itemsize == 1 else self.pool
                held = held[ids, layer, which].view(self.pool.dtype).flatten(0, 1)
                begin = row.start - first * BLOCK_TOKENS
                parts.append(held[begin : begin + row.length].to(torch.bfloat16))
            found.append(torch.cat(parts))
        return found[0], found[1]


def worst_error(device: Device, cell: Cell, settings: AttentionSettings) -> float:
    rows = device.rows(cell.spans)
    plan = device.plan(cell, rows, settings)
    query = torch.randn(plan.batch.num_tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device.device)
    key, value = device.kv_of(rows, 1)
    out = paged_attention(query, device.pool, 1, plan, device.form(cell), key=key, value=value, kv_scale=device.kv_scale)
    picked = [row._replace(first=i, start=row.start + row.length - 1, length=1) for i, row in enumerate(rows)]
    last = torch.tensor([row.first + row.length - 1 for row in rows], device=device.device)
    expected = paged_attention_reference(query[last].float(), device.pool.float(), 1, picked, device.form(cell))
    return float((out[last].float() - expected).abs().max())


def seconds(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """The median of each call over all layers of the pool, timed in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for taken, call in zip(times, calls, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)  # pyright: ignore[reportPrivateUsage]  # so that the host is ahead
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
    return [statistics.median(taken) for taken in times]


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """`call` as a graph: what a decoding step is when served."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def timed(device: Device, cell: Cell, rounds: int, bandwidth: float) -> str:
    rows = device.rows(cell.spans)
    query = torch.randn(rows[-1].first + rows[-1].length, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device.device)
    key, value = torch.randn(2, len(query), KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device.device)
    form = device.form(cell)
    workspaces = {name: AttentionWorkspace(device.device) for name in WAYS}
    calls: list[Callable[[], object]] = []
    plans: list[DevicePlan] = []  # a graph does not keep the tensors that it reads
    shapes: list[str] = []
    for name in WAYS:
        device.workspace = workspaces[name]
        plan = device.plan(cell, rows, WAYS[name])
        plans.append(plan)
        items = [int(work.counts[0]) * KV_HEADS for work in plan.lists]
        shapes.append(f"{name} {'+'.join(map(str, items)) or '-'}")

        def layers(plan: DevicePlan = plan) -> None:
            for layer in range(device.layers):
                paged_attention(query, device.pool, layer, plan, form, key=key, value=value, kv_scale=device.kv_scale)

        calls.append(layers if cell.is_mixed else captured(layers))
    times = [one / device.layers for one in seconds(calls, rounds)]
    size = device.pool.dtype.itemsize
    read = sum(min(start + count, cell.window + count - 1 if cell.window else 1 << 40) for start, count in cell.spans)
    least = 2 * read * KV_HEADS * HEAD_DIM * size / bandwidth
    shown = "  ".join(f"{name} {one * 1e6:8.1f}" for name, one in zip(WAYS, times, strict=True))
    return f"{cell.name:32s} {shown}  | bytes/bw {least * 1e6:7.1f}, reached {least / min(times):4.0%} | {', '.join(shapes)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bandwidth", type=float, default=4.05e12, help="bytes/s of a reduction on this device")
    parser.add_argument("--kv", choices=("bf16", "fp8"), nargs="+", default=["bf16", "fp8"])
    options = parser.parse_args()
    lines: list[str] = []
    for kv in options.kv:
        dtype = torch.float8_e4m3fn if kv == "fp8" else torch.bfloat16
        with torch.inference_mode():
            small = Device(2, 1200, dtype)
            for cell in CHECKED:
                for name, settings in WAYS.items():
                    error = worst_error(small, cell, settings)
                    print(f"{kv}, {cell.name}, {name}: largest error {error:.1e}", flush=True)
                    if not error < 2e-2:
                        raise SystemExit("wrong numbers are not timed")
            del small
            device = Device(options.layers, 17_000, dtype)
            for cell in CELLS:
                lines.append(f"{kv} {timed(device, cell, options.rounds, options.bandwidth)}")
                print(lines[-1], flush=True)
            del device
            torch.cuda.empty_cache()
    print("\nµs per layer; old: the cut before, even: all items at once; programs of each")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
