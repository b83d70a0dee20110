"""Every candidate of paged attention, timed and compared: `python -m bench.engine.attention_kernels`.

The default of a shape comes first, marked *. Decode and verification: GB/s of K and V read once. Chunks: TFLOP/s of what is
visible. Merges are included, the work list is not (it is made once per step; see the line `plan`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F

from bench.common.machine import describe
from bench.common.table import markdown, number
from bench.engine.timing import rotations, seconds_per_call
from common.ops import backend
from common.ops.attention_configs import AttentionConfig, Kind, attention_candidates
from common.ops.paged_attention import AttentionRow, AttentionWorkspace, DeviceBatch, paged_attention, plan_device_attention

_BLOCK_TOKENS = 16
_SHAPES = {"llama-8b": (32, 8, 128), "qwen3-32b": (64, 8, 128), "llama-1b": (32, 8, 64), "smollm2": (9, 3, 64)}
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
Spans = list[tuple[int, int]]  # (keys before the step, queries) by row


@dataclass(slots=True)
class Step:
    """One step on the device; `layers` of KV, so that calls find nothing of the last round in the cache."""

    name: str
    kind: Kind
    spans: Spans
    query: torch.Tensor
    pool: torch.Tensor
    rows: list[AttentionRow]
    batch: DeviceBatch
    layers: int

    @property
    def scale(self) -> float:
        return self.pool.shape[5] ** -0.5

    def work(self) -> float:
        """Bytes of K and V, or for chunks multiplications and additions."""
        heads, (kv_heads, head_dim) = self.query.shape[1], self.pool.shape[4:]
        if self.kind == "decode":
            return sum(start + count for start, count in self.spans) * 2 * kv_heads * head_dim * self.pool.dtype.itemsize
        return sum(count * (2 * start + count) / 2 for start, count in self.spans) * 4 * heads * head_dim

    def expected(self, row: AttentionRow) -> torch.Tensor:
        """[queries, heads, head_dim] in float32, layer 0."""
        heads, (kv_heads, head_dim) = self.query.shape[1], self.pool.shape[4:]
        end = row.start + row.length
        held = self.pool[torch.tensor(list(row.blocks), device=self.pool.device), 0].float()
        key, value = held.transpose(0, 1).reshape(2, -1, kv_heads, head_dim)[:, :end].transpose(1, 2)
        query = self.query[row.first : row.first + row.length].float().transpose(0, 1)
        positions = torch.arange(row.start, end, device=self.pool.device)
        seen = torch.arange(end, device=self.pool.device)[None, :] <= positions[:, None]
        key, value = (x.repeat_interleave(heads // kv_heads, 0) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, seen, scale=self.scale).transpose(0, 1)


def make_step(name: str, spans: Spans, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Step:
    heads, kv_heads, head_dim = shape
    needed = [-(-(start + count) // _BLOCK_TOKENS) for start, count in spans]
    layer_bytes = sum(needed) * _BLOCK_TOKENS * 2 * kv_heads * head_dim * dtype.itemsize
    layers = rotations(layer_bytes, device)
    pool = torch.empty(sum(needed), layers, 2, _BLOCK_TOKENS, kv_heads, head_dim, dtype=dtype, device=device)
    for block in pool.split(64):
        block.copy_(torch.randn(block.shape, device=device))
    ids = torch.randperm(sum(needed)).tolist()
    rows: list[AttentionRow] = []
    first = taken = 0
    for (start, count), blocks in zip(spans, needed, strict=True):
        rows.append(AttentionRow(first, count, start, ids[taken : taken + blocks]))
        first, taken = first + count, taken + blocks

    def starts(counts: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0, *counts]).cumsum(0).int().to(device)

    batch = DeviceBatch(
        query_starts=starts([count for _, count in spans]),
        context_lens=torch.tensor([start + count for start, count in spans], dtype=torch.int32, device=device),
        block_ids=torch.tensor(ids, dtype=torch.int32, device=device),
        block_starts=starts(needed),
        max_queries=max(count for _, count in spans),
        num_tokens=first,
    )
    query = torch.randn(first, heads, head_dim, device=device).bfloat16()
    kind: Kind = "decode" if batch.max_queries <= 16 else "prefill"
    return Step(name, kind, spans, query, pool, rows, batch, layers)


def steps(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Iterator[Step]:
    if device.type == "cpu":
        yield make_step("3 ragged", [(70, 1), (3, 1), (300, 1)], shape, dtype, device)
        return
    generator = torch.Generator().manual_seed(1)
    ragged = [int(2 ** (7 + 6 * x)) for x in torch.rand(64, generator=generator).tolist()]
    cases: list[tuple[str, Spans]] = [
        *((f"{rows} × {keys}", [(keys - 1, 1)] * rows) for rows, keys in ((1, 256), (1, 8192), (1, 65536), (8, 640))),
        *((f"{rows} × {keys}", [(keys - 1, 1)] * rows) for rows, keys in ((32, 640), (128, 640), (256, 640), (16, 16384))),
        ("64 of 128–8192", [(keys, 1) for keys in ragged]),
        ("1 × 65536 + 63 × 640", [(639, 1)] * 63 + [(65535, 1)]),
        ("32 × 640, 5 queries", [(635, 5)] * 32),
        ("2048 after 8192", [(8192, 2048)]),
        ("8192 after 0", [(0, 8192)]),
        ("512 after 8192 + 63 × 640", [(639, 1)] * 63 + [(8192, 512)]),
    ]
    for name, spans in cases:
        yield make_step(name, spans, shape, dtype, device)


def measure(step: Step, config: AttentionConfig | None) -> tuple[float, float]:
    """Seconds of a call, and the largest relative error over some rows."""
    workspace = AttentionWorkspace(step.pool.device)
    plan = plan_device_attention(step.batch, step.pool, step.query.shape[1], workspace, prefill_backend="kernel", config=config)
    attend = partial(paged_attention, step.query, step.pool, plan=plan, scale=step.scale)
    found = attend(layer=0).float()
    errors = [0.0]
    for row in [row for row in (step.rows[0], step.rows[-1]) if row.length * (row.start + row.length) < 1 << 25]:
        expected = step.expected(row)
        difference = found[row.first : row.first + row.length] - expected
        errors.append(float(difference.norm() / expected.norm()))
    calls = [partial(attend, layer=layer) for layer in range(step.layers)]
    return seconds_per_call(calls, step.pool.device, min_s=0.005), max(errors)


def sdpa_seconds(step: Step, prefill_backend: str) -> float:
    """The same step as a prompt without a prefix, through SDPA, its copy into the output included."""
    from common.ops.attention_prefill import attend_fresh
    from common.ops.attention_work import FreshRun

    shape = (len(step.query), *step.pool.shape[4:])
    key, value = (torch.randn(shape, device=step.query.device).bfloat16() for _ in range(2))
    run, output = FreshRun(0, 1, len(step.query)), torch.empty_like(step.query)
    call = partial(attend_fresh, step.query, key, value, [run], prefill_backend, step.scale, output)  # pyright: ignore
    return seconds_per_call([call], step.query.device, min_s=0.005)


def describe_config(config: AttentionConfig) -> str:
    shown = {field.name: getattr(config, field.name) for field in fields(config)}
    return " ".join(f"{name}={int(value)}" for name, value in shown.items() if value)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.attention_kernels", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama-8b", choices=sorted(_SHAPES))
    parser.add_argument("--dtype", default="bf16", choices=sorted(_DTYPES))
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--candidates", type=int, default=1, help="how many of the table; 1: what is chosen now; 1000: all")
    parser.add_argument("--best", type=int, default=6, help="how many to print of each step")
    options = parser.parse_args(argv)
    device, dtype = torch.device(options.device), _DTYPES[options.dtype]
    heads, kv_heads, head_dim = shape = _SHAPES[options.shape]
    lines: list[list[str]] = []
    with backend.interpreted() if device.type == "cpu" else nullcontext():
        for step in steps(shape, dtype, device):
            if options.only not in step.name:
                continue
            unit = "GB/s" if step.kind == "decode" else "TFLOP/s"
            results: list[tuple[float, list[str]]] = []

            def add(name: str, seconds: float, error: str, step: Step = step, unit: str = unit, results=results) -> None:
                rate = step.work() / seconds / (1e9 if unit == "GB/s" else 1e12)
                results.append((seconds, [step.name, name, number(seconds * 1e6, 1), f"{number(rate)} {unit}", error]))

            seconds, error = measure(step, None)
            add("* chosen", seconds, f"{error:.1e}")
            queries = step.batch.max_queries if step.kind == "decode" else 1
            for config in islice(attention_candidates(head_dim, heads // kv_heads, dtype, step.kind), options.candidates - 1):
                rows = heads // kv_heads * queries
                wide = replace(config, block_m=max(config.block_m, min(64, 1 << (rows - 1).bit_length())))
                try:
                    seconds, error = measure(step, wide)
                except Exception as failure:  # a candidate may not fit the card
                    lines.append([step.name, describe_config(wide), "", "", str(failure).splitlines()[0][:60]])
                    continue
                add(describe_config(wide), seconds, f"{error:.1e}")
            if step.name == "8192 after 0" and dtype == torch.bfloat16:
                for prefill_backend in ("cudnn", "flash"):
                    add(prefill_backend, sdpa_seconds(step, prefill_backend), "")
            lines += [results[0][1], *(line for _, line in sorted(results[1:], key=lambda pair: pair[0])[: options.best])]
            workspace = AttentionWorkspace(device)
            make = partial(plan_device_attention, step.batch, step.pool, heads, workspace, prefill_backend="kernel")
            lines.append([step.name, "plan", number(seconds_per_call([make], device, min_s=0.002) * 1e6, 1), "", ""])
    print(describe())
    print(markdown(["step", "candidate", "µs", "rate", "error"], lines))


if __name__ == "__main__":
    main(sys.argv[1:])
