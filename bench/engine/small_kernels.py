"""Every candidate of the small kernels (norm, QKV to pool, block copies), timed: `python -m bench.engine.small_kernels`.

What is set in the op's `_triton.py` comes first, marked *. GB/s count each byte that must be read or written once. With
`TRITON_INTERPRET=1 … --device cpu` it runs in Triton's interpreter, in small, to see that it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from bench.common.machine import describe
from bench.common.table import markdown, number
from bench.engine.timing import rotations, seconds_per_call
from common.ops import backend

_CACHED_BYTES = 16 << 20  # of so little, what the kernel before wrote is still in the cache, as in a decode step
_BLOCK_TOKENS, _LAYERS = 16, 2
T = TypeVar("T")


@dataclass(slots=True)
class Timed:
    """make: a call on buffers of its own. size: bytes read and written."""

    op: str
    case: str
    candidate: str
    size: int
    make: Callable[[], Callable[[], object]]


def norms(device: torch.device, small: bool) -> Iterator[Timed]:
    from common.ops.norm import add_rms_norm_triton as norm_triton  # here and below: --help does without Triton

    def make(rows: int, size: int, splits: int, quantise: bool, elements: int) -> Callable[[], object]:
        residual, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((rows, size), (size,)))
        delta = torch.randn(splits, rows, size, device=device) if splits else torch.zeros_like(residual)
        return partial(
            norm_triton.add_rms_norm_triton, residual, delta, weight, 1e-5, quantise=quantise, elements_per_thread=elements
        )

    for size in (64,) if small else (4096, 2048, 5120):
        for rows, splits in ((2, 2),) if small else ((1, 4), (1, 8), (16, 4), (64, 2), (256, 0), (8192, 0)):
            for quantise in (False, True):
                read = rows * size * (2 + (4 * splits or 2))
                written = rows * size * (2 + (1 if quantise else 2))
                case = f"{rows} × {size}, {splits or 'no'} partials{', to fp8' if quantise else ''}"
                for elements in _first(norm_triton.CANDIDATES, norm_triton.ELEMENTS_PER_THREAD):
                    name = f"{elements} elements a thread"
                    yield Timed("norm", case, name, read + written, partial(make, rows, size, splits, quantise, elements))


def projections(device: torch.device, small: bool) -> Iterator[Timed]:
    from common.ops.kv import qkv_rope_triton
    from common.ops.kv.forms import HeadForm, KvTarget

    def make(
        rows: int, heads: int, kv_heads: int, dim: int, splits: int, pool_dtype: torch.dtype, need_kv: bool, warps: int
    ) -> Callable[[], object]:
        size = (heads + 2 * kv_heads) * dim
        blocks = -(-rows // _BLOCK_TOKENS)
        target = KvTarget(
            torch.zeros(blocks, _LAYERS, 2, _BLOCK_TOKENS, kv_heads, dim, device=device).to(pool_dtype),
            torch.randperm(blocks * _BLOCK_TOKENS, device=device)[:rows],
            k_center=torch.randn(_LAYERS, kv_heads, dim, device=device) if pool_dtype.itemsize == 1 else None,
            mix=pool_dtype.itemsize == 1,
        )
        return partial(
            qkv_rope_triton.qkv_rope_triton,
            torch.randn(splits, rows, size, device=device) if splits else torch.randn(rows, size, device=device).bfloat16(),
            HeadForm(heads, 1e-6),
            target,
            1,
            positions=torch.randint(0, 4096, (rows,), device=device),
            rope=torch.randn(4096, dim, device=device),
            bias=None,
            dtype=torch.bfloat16,
            need_kv=need_kv,
            num_warps=warps,
        )

    for heads, kv_heads, dim in ((4, 2, 32),) if small else ((32, 8, 128), (32, 8, 64), (64, 8, 128)):
        for rows, splits in ((2, 2),) if small else ((1, 4), (16, 4), (64, 2), (256, 0), (8192, 0)):
            for dtype in (torch.bfloat16, torch.float8_e4m3fn):
                need_kv = rows > 256
                values, entries = rows * heads * dim, 2 * rows * kv_heads * dim
                size = (values + entries) * (4 * splits or 2) + values * 2 + entries * (dtype.itemsize + 2 * need_kv)
                case = f"{rows} rows, {heads}/{kv_heads} × {dim}, {splits or 'no'} partials, pool {str(dtype)[6:]}"
                chosen = qkv_rope_triton.choose(rows, mix=dtype.itemsize == 1, batch_invariant=False)
                for warps in _first(qkv_rope_triton.CANDIDATES, chosen):
                    of = partial(make, rows, heads, kv_heads, dim, splits, dtype, need_kv, warps)
                    yield Timed("qkv_rope", case, f"{warps} warps", size, of)


def copies(device: torch.device, small: bool) -> Iterator[Timed]:
    from common.ops.kv import block_copy_triton

    def make(count: int, size: int, host: bool, chunk: int, warps: int, programs: int | None) -> Callable[[], object]:
        pool = torch.zeros(2 * count, size, dtype=torch.uint8, device=device)
        staging = torch.zeros(count, size, dtype=torch.uint8, device="cpu" if host else device, pin_memory=host)
        ids = torch.randperm(2 * count, device=device)[:count]
        copy = partial(block_copy_triton.copy_blocks_triton, pool, ids, staging, None, count, programs)
        return partial(copy, chunk=chunk, num_warps=warps)

    size = 4096 if small else 2 << 20
    default = (block_copy_triton.CHUNK, block_copy_triton.NUM_WARPS)
    for count in (2,) if small else (1, 16, 256):
        for chunk, warps in _first(block_copy_triton.CANDIDATES, default):
            case = f"{count} × {size:,} bytes, on the device"
            yield Timed(
                "copy",
                case,
                f"{chunk} words, {warps} warps",
                2 * count * size,
                partial(make, count, size, False, chunk, warps, None),
            )
    if device.type == "cuda":
        for programs in (4, 8, 16, 32, 64, 256):
            case = f"64 × {size:,} bytes, to pinned memory"
            yield Timed("copy", case, f"{programs} programs", 64 * size, partial(make, 64, size, True, *default, programs))


def _first(candidates: tuple[T, ...], default: T) -> list[T]:
    return [default, *(candidate for candidate in candidates if candidate != default)]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.small_kernels", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="norm, qkv_rope or copy")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    small = device.type == "cpu"
    rows: list[list[str]] = []
    before = ""
    with backend.interpreted() if small else nullcontext():
        for kind in (norms, projections, copies):
            for timed in kind(device, small):
                if options.only not in ("", timed.op):
                    continue
                buffers = rotations(timed.size, device) if timed.size > _CACHED_BYTES else 1
                mark = "*" if timed.case != before else ""
                before = timed.case
                try:
                    seconds = seconds_per_call([timed.make() for _ in range(buffers)], device, min_s=0.005)
                    figures = [number(seconds * 1e6, 2), number(timed.size / seconds / 1e9)]
                except Exception as error:  # the others still count
                    if not backend.gpu_answers():
                        raise
                    figures = [type(error).__name__, "—"]
                rows.append([timed.op, timed.case, mark + timed.candidate, *figures])
                print(" | ".join(rows[-1]), flush=True)  # at once: there may be no time for all
    print(describe())
    print(markdown(["op", "case", "candidate", "µs", "GB/s"], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
