"""Every kernel of a step beside its reference, on the card itself: `python -m bench.engine.check`.

Shapes of real models and odd ones, a few numbers of rows, all formats of weights and KV, the implementations that would be
chosen now; `--every` also runs all the candidates of the linears. Results are compared with plain torch in float32 (attention:
float64), on memory that is NaN before (`torch.empty` fills it). With batch_invariant, a row alone and among others: equal bits.
`--sanitizer` runs the small ones under compute-sanitizer. Ends with 1 if anything is off.

Checks run side by side. After a read or write outside memory the GPU answers nothing else, and it could have been any of them:
such a part runs again in a process of its own, one check after the other up to the first that breaks (`--one-by-one`).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from bench.common.machine import describe
from bench.engine.checks import Checks
from bench.engine.sweeps import short
from common.ops import backend
from common.ops.attention.form import AttentionForm
from common.ops.attention.paged_attention import (
    AttentionRow,
    AttentionWorkspace,
    DeviceBatch,
    DeviceRow,
    paged_attention,
    plan_device_attention,
)
from common.ops.attention.paged_reference import paged_attention_reference
from common.ops.attention.settings import DEFAULT_SETTINGS, AttentionSettings
from common.ops.kv.forms import HeadForm, KvTarget
from common.ops.kv.qkv_rope import qkv_rope
from common.ops.kv.qkv_rope_reference import qkv_rope_reference
from common.ops.linear import device as linear_device
from common.ops.linear.candidates import Op
from common.ops.linear.embed import embed
from common.ops.linear.gate_up_reference import gate_up_reference
from common.ops.linear.weight import LinearWeight, linear_from_fp8, pack_linear
from common.ops.norm.add_rms_norm import add_rms_norm
from common.ops.norm.add_rms_norm_reference import add_rms_norm_reference
from common.ops.quant.quantise import quantise_rows, quantise_weight
from common.ops.quant.quantise_reference import dequantise_weight_reference
from common.ops.tensors import Feed, Quantised
from common.ops.tuning import poisoned
from common.runtime import parent_death

FP8 = torch.float8_e4m3fn
LINEARS = {"8B": (6144, 4096), "8B down": (4096, 14336), "135M": (960, 576), "1B gate_up": (16384, 2048), "odd": (704, 328)}
HEADS = {"8B": (32, 8, 128), "1B": (32, 8, 64), "135M": (9, 3, 64), "odd": (6, 2, 80)}
ROWS = (1, 2, 3, 8, 17, 64, 100, 256, 700)
SPANS: dict[str, list[tuple[int, int]]] = {
    "decode": [(0, 1), (5, 1), (4095, 1), (16, 1), (1000, 1)],
    "one long row": [(20_000, 1)],
    "verification": [(40, 5), (700, 5), (3, 5)],
    "prompts": [(0, 130), (64, 70), (0, 1), (333, 20)],
    "prompts without a prefix": [(0, 130), (0, 130), (0, 77)],
    "long prompts without a prefix": [(0, 1500), (0, 1024)],  # cuDNN's, one of them padded
    "long pieces after long prefixes": [(3333, 1100), (700, 5), (2048, 1024)],  # cuDNN's, in parts, but for the second
}
INVARIANT = AttentionSettings(batch_invariant=True)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
FP8_TOLERANCE = 8e-3
"""Of float32 results with FP8 weights of up to 8,192 inputs, and in proportion with more. Where the library does not take a
weight's scales, quantised activations (or the weight, for plain ones) are brought to bf16 before the product; where it does,
tensor cores add FP8 products up in fewer bits than float32 has. Either is off by about 2e-3 of the largest result, whatever the
results are stored in; sums of 14,336 products by up to 1e-2 on an H200."""


def linears(checks: Checks, shapes: dict[str, tuple[int, int]], rows: Sequence[int], *, every: bool) -> None:
    for (name, (out, size)), kind in itertools.product(shapes.items(), ("bf16", "fp32", "fp8", "fp8 blocks")):
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        plain = checks.random(out, size, dtype=dtype) / size**0.5
        weight = _weight(plain, kind)
        scale = weight.scale
        wide = plain.float() if scale is None else dequantise_weight_reference(weight.data, scale)
        for count, op in itertools.product(rows, ("linear", "wide", "split", "gated")):
            for quantised in (False, True) if scale is not None else (False,):
                given = checks.random(count, size, dtype=dtype)
                x = quantise_rows(given) if quantised else given
                seen = x.data.float() * x.scale[:, None] if isinstance(x, Quantised) else given.float()
                wanted = gate_up_reference(seen, wide, None) if op == "gated" else seen @ wide.t()
                options = linear_device.options(op, weight, count, quantised) if every else []
                for chosen in options or [linear_device.choose(op, weight, count, quantised)]:
                    case = f"{name} {out}x{size} {kind}, {count} rows, {short(chosen)}"

                    def check(
                        op: Op = op, x: torch.Tensor | Quantised = x, chosen: object = chosen, wanted: torch.Tensor = wanted,
                        weight: LinearWeight = weight, case: str = case, dtype: torch.dtype = dtype,
                    ) -> None:  # fmt: skip
                        found = linear_device.run(op, x, weight, chosen)  # pyright: ignore[reportArgumentType]
                        found = found.float().sum(0) if found.ndim == 3 else found
                        checks.close(f"linear, {op}", case, found, wanted, allowed(op, weight, dtype))

                    checks.attempt(f"linear, {op}", case, check)


def allowed(op: Op, weight: LinearWeight, dtype: torch.dtype) -> float:
    """Return the tolerance of a linear's results in a model of `dtype`, as `Checks.close` takes it."""
    if op != "wide":
        return TOLERANCE[dtype]
    return TOLERANCE[torch.float32] if weight.scale is None else FP8_TOLERANCE * max(1.0, weight.in_features / 8192)


def _weight(plain: torch.Tensor, kind: str, *, batch_invariant: bool = False) -> LinearWeight:
    if kind == "fp8 blocks":
        return linear_from_fp8(*quantise_weight(plain, 128), batch_invariant=batch_invariant)
    return pack_linear(plain, format="fp8" if kind == "fp8" else "plain", batch_invariant=batch_invariant)


def attention(checks: Checks, heads: dict[str, tuple[int, int, int]], spans: dict[str, list[tuple[int, int]]]) -> None:
    for (name, (q, kv, dim)), (what, rows), pool_kind in itertools.product(
        heads.items(), spans.items(), (torch.bfloat16, torch.float32, FP8)
    ):
        case = f"{name} {q}/{kv} x {dim}, {what}, pool {str(pool_kind)[6:]}"

        def check(
            q: int = q, kv: int = kv, dim: int = dim, rows: list[tuple[int, int]] = rows, pool_kind: torch.dtype = pool_kind,
            case: str = case,
        ) -> None:  # fmt: skip
            pool, listed, batch = _batch(checks, rows, kv, dim, pool_kind)
            dtype = torch.bfloat16 if pool_kind == FP8 else pool_kind
            query = checks.random(batch.num_tokens, q, dim, dtype=dtype)
            kv_scale = torch.rand(2, 2, kv, device=checks.device) + 0.5 if pool_kind == FP8 else None
            plain = pool.float() if kv_scale is None else pool.float() * kv_scale[None, :, :, None, :, None]
            fresh: dict[str, Any] = {}
            known = all(start == 0 for start, _ in rows) or any(
                DEFAULT_SETTINGS.suits_parts(length, start) for start, length in rows
            )
            if known and checks.device.type == "cuda":
                firsts = batch.block_starts.tolist()
                batch.rows = [DeviceRow(*row[:3], first) for row, first in zip(listed, firsts, strict=True)]
                # SDPA takes them, with K and V as tensors
                held = [(row, plain[list(row.blocks), 1].transpose(0, 1).flatten(1, 2)) for row in listed]
                own = [kv_of_row[:, row.start : row.start + row.length] for row, kv_of_row in held]
                keys, values = torch.cat(own, dim=1).to(dtype)
                fresh = {"key": keys.contiguous(), "value": values.contiguous()}
            plan = plan_device_attention(batch, pool, q, AttentionWorkspace(checks.device), dtype=dtype)
            found = paged_attention(query, pool, 1, plan, AttentionForm(dim**-0.5), kv_scale=kv_scale, **fresh)
            wanted = paged_attention_reference(query.float(), plain, 1, listed, AttentionForm(dim**-0.5))
            checks.close("attention", case, found, wanted, TOLERANCE[dtype])

        checks.attempt("attention", case, check)


def _batch(
    checks: Checks, spans: list[tuple[int, int]], kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, list[AttentionRow], DeviceBatch]:
    """A pool of two layers, rows with blocks in random order, and the same on the device."""
    counts = [-(-(start + length) // 16) for start, length in spans]
    free = torch.randperm(sum(counts) + 4).tolist()
    pool = checks.random(len(free), 2, 2, 16, kv_heads, head_dim).to(dtype)
    rows, first = [], 0
    for (start, length), count in zip(spans, counts, strict=True):
        rows.append(AttentionRow(first, length, start, [free.pop() for _ in range(count)]))
        first += length

    def ints(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=checks.device)

    batch = DeviceBatch(
        query_starts=ints([*(row.first for row in rows), first]),
        context_lens=ints([row.start + row.length for row in rows]),
        block_ids=ints([block for row in rows for block in row.blocks]),
        block_starts=ints(itertools.accumulate(counts[:-1], initial=0)),
        max_queries=max(length for _, length in spans),
        num_tokens=first,
    )
    return pool, rows, batch


def small_ops(checks: Checks, heads: dict[str, tuple[int, int, int]], rows: Sequence[int]) -> None:
    for count, size, splits in itertools.product(rows, (4096, 576), (0, 1, 5)):
        case = f"{count} x {size}, {splits} partials"
        residual, weight = checks.random(count, size, dtype=torch.bfloat16), checks.random(size, dtype=torch.bfloat16)
        delta = checks.random(splits, count, size) if splits else checks.random(count, size, dtype=torch.bfloat16)

        def check(
            case: str = case, residual: torch.Tensor = residual, delta: torch.Tensor = delta, weight: torch.Tensor = weight
        ) -> None:
            new, normed = add_rms_norm_reference(residual.cpu(), delta.cpu(), weight.cpu(), 1e-5)
            mine = residual.clone()
            found = add_rms_norm(mine, delta, weight, 1e-5)
            assert isinstance(found, torch.Tensor)
            checks.close("add_rms_norm", case, found, normed, 1e-2)
            checks.close("add_rms_norm", f"{case}, residual", mine, new, 1e-2)
            quantised = add_rms_norm(residual.clone(), delta, weight, 1e-5, quantise=True)
            assert isinstance(quantised, Quantised)
            checks.close("add_rms_norm to fp8", case, quantised.data.float() * quantised.scale[:, None], normed, 0.07)

        checks.attempt("add_rms_norm", case, check)
    table = checks.random(1000, 576, dtype=torch.bfloat16)
    tokens = torch.tensor([5, -1, 7, 999], device=checks.device)
    feed = Feed(torch.tensor([-1, 2, -1, 0], device=checks.device), torch.tensor([3, 0, 11], device=checks.device))
    fed = lambda: checks.same("embed", "with fed tokens", embed(tokens, table, feed), table[[5, 11, 7, 3]])  # noqa: E731
    checks.attempt("embed", "with fed tokens", fed)
    for (name, (q, kv, dim)), count, norms in itertools.product(heads.items(), rows, (False, True)):
        for pool_dtype in (torch.bfloat16, FP8):
            case = f"{name} {q}/{kv} x {dim}, {count} rows, pool {str(pool_dtype)[6:]}"
            _projection(checks, case, q, kv, dim, count, pool_dtype, norms)


def _projection(checks: Checks, case: str, q: int, kv: int, dim: int, count: int, pool_dtype: torch.dtype, norms: bool) -> None:
    qkv = checks.random(3, count, (q + 2 * kv) * dim)
    blocks = -(-count // 16) + 2
    q_norm, k_norm = (checks.random(dim, dtype=torch.bfloat16) if norms else None for _ in range(2))
    form = HeadForm(q, 1e-6, q_norm, k_norm)
    center = checks.random(2, kv, dim) if pool_dtype == FP8 else None
    slots = torch.randperm(blocks * 16, device=checks.device)[:count]
    pool = torch.zeros(blocks, 2, 2, 16, kv, dim, device=checks.device).to(pool_dtype)
    target = KvTarget(pool, slots, k_center=center, mix=pool_dtype == FP8)
    positions, rope = torch.randint(0, 500, (count,), device=checks.device), checks.random(500, dim)
    expected = pool.cpu().clone()
    on_host = HeadForm(q, 1e-6, None if q_norm is None else q_norm.cpu(), None if k_norm is None else k_norm.cpu())
    host = KvTarget(expected, slots.cpu(), k_center=None if center is None else center.cpu(), mix=target.mix)

    def check() -> None:
        made = qkv_rope(qkv, form, target, 1, positions=positions, rope=rope, dtype=torch.bfloat16, need_kv=True)
        wanted = qkv_rope_reference(
            qkv.cpu(), on_host, host, 1, positions=positions.cpu(), rope=rope.cpu(), bias=None, dtype=torch.bfloat16
        )
        for which, one, other in zip("qkv", made, wanted, strict=True):
            checks.close("qkv_rope", f"{case}, {which}", one, other, 1e-2)
        checks.close("qkv_rope", f"{case}, pool", pool.float(), expected.float(), 0.07 if pool_dtype == FP8 else 1e-2)

    checks.attempt("qkv_rope", case, check)


def invariance(checks: Checks, shapes: dict[str, tuple[int, int]], heads: dict[str, tuple[int, int, int]]) -> None:
    """Rows alone and among others, under batch_invariant: equal bits."""
    for (name, (out, size)), kind in itertools.product(shapes.items(), ("bf16", "fp8")):
        weight = _weight(checks.random(out, size, dtype=torch.bfloat16), kind, batch_invariant=True)
        x = checks.random(200, size, dtype=torch.bfloat16)

        def products(count: int, weight: LinearWeight = weight, x: torch.Tensor = x) -> torch.Tensor:
            found = linear_device.linear_device(x[:count].contiguous(), weight, split=True)[..., :1, :]
            return functools.reduce(torch.add, found) if found.ndim == 3 else found  # partial sums, as who reads them does

        for count in (2, 17, 200):
            case = f"linear {name} {kind}, 1 of {count}"
            checks.attempt("invariance", case, lambda n=count, c=case, p=products: checks.same("invariance", c, p(n), p(1)))
    for name, (q, kv, dim) in heads.items():
        pool, rows, _ = _batch(checks, [(3000, 1), (5, 1), (400, 1), (8000, 1)], kv, dim, torch.bfloat16)
        query = checks.random(4, q, dim, dtype=torch.bfloat16)

        def attended(
            picked: list[int], q: int = q, dim: int = dim, pool: torch.Tensor = pool, query: torch.Tensor = query,
            rows: list[AttentionRow] = rows,
        ) -> torch.Tensor:  # fmt: skip
            some = [rows[index] for index in picked]

            def ints(values: Iterable[int]) -> torch.Tensor:
                return torch.tensor(list(values), dtype=torch.int32, device=checks.device)

            batch = DeviceBatch(
                query_starts=ints(range(len(some) + 1)),
                context_lens=ints([row.start + 1 for row in some]),
                block_ids=ints([block for row in some for block in row.blocks]),
                block_starts=ints(itertools.accumulate((len(row.blocks) for row in some[:-1]), initial=0)),
                max_queries=1,
                num_tokens=len(some),
            )
            plan = plan_device_attention(batch, pool, q, AttentionWorkspace(checks.device), settings=INVARIANT)
            return paged_attention(query[picked].contiguous(), pool, 1, plan, AttentionForm(dim**-0.5))[:1].contiguous()

        case = f"attention {name}, 1 of 4"
        checks.attempt("invariance", case, lambda c=case, a=attended: checks.same("invariance", c, a([0, 1, 2, 3]), a([0])))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.check", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu: in Triton's interpreter, for tests")
    parser.add_argument("--small", action="store_true", help="the odd shapes alone")
    parser.add_argument("--every", action="store_true", help="every candidate of the linears, not only what is chosen")
    parser.add_argument("--only", default="", help="linears, attention, small_ops, invariance; between commas")
    parser.add_argument("--one-by-one", action="store_true", help="not side by side, up to the first that breaks the GPU")
    parser.add_argument("--sanitizer", action="store_true", help="run --small under compute-sanitizer")
    options = parser.parse_args(argv)
    if options.sanitizer:
        return sanitized()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or it warns, while memory is poisoned
    device, begun = torch.device(options.device), time.perf_counter()
    checks = Checks(device, one_by_one=options.one_by_one)
    small, on_cpu = options.small or device.type == "cpu", device.type == "cpu"
    shapes = {"odd": (96, 72)} if on_cpu else {"odd": LINEARS["odd"]} if small else LINEARS
    heads = {"odd": (4, 2, 32)} if on_cpu else {"odd": HEADS["odd"]} if small else HEADS
    rows = (1, 3) if on_cpu else (1, 3, 17, 100) if small else ROWS
    spans = {"all": [(20, 1), (7, 3), (0, 1)]} if on_cpu else SPANS
    parts: dict[str, Callable[[], None]] = {
        "small_ops": lambda: small_ops(checks, heads, rows),
        "linears": lambda: linears(checks, shapes, rows, every=options.every),
        "attention": lambda: attention(checks, heads, spans),
        "invariance": lambda: invariance(checks, shapes, heads),
    }
    left = options.only.split(",") if options.only else list(parts)
    with backend.interpreted() if on_cpu else nullcontext(), torch.inference_mode(), poisoned():
        while left and not checks.broken:
            name, before = left.pop(0), len(checks.wrong)
            try:
                parts[name]()
            except Exception as error:  # in what prepares the checks: the other parts still run
                checks.fail(name, "preparing", error)
            checks.finish()
            wrong = checks.wrong[before:]
            print(f"{name}: {time.perf_counter() - begun:.0f} s, {len(wrong)} wrong", flush=True)
            shown = 4 if checks.broken and not options.one_by_one else 40  # of many, that one of them broke for all
            print("".join(f"WRONG: {what}\n" for what in wrong[:shown]), end="", flush=True)
            if checks.broken:
                print(f"the GPU answers no more after {wrong[-1] if options.one_by_one else name}", flush=True)
                if not options.one_by_one:
                    _again(options, name, ["--one-by-one"])
    print(f"\n{checks.table()}\n\n{describe()}\n{'' if checks.wrong else 'all well'}", flush=True)
    if checks.broken and left:
        _again(options, ",".join(left), ["--one-by-one"] if options.one_by_one else [])
    return 1 if checks.wrong else 0


def _again(options: argparse.Namespace, only: str, flags: list[str]) -> None:
    """Parts in a process of their own."""
    flags = [*flags, *(f"--{name}" for name in ("small", "every") if getattr(options, name))]
    command = [sys.executable, "-m", "bench.engine.check", f"--device={options.device}", f"--only={only}", *flags]
    subprocess.run(command, check=False)


def sanitized() -> int:
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        print("no compute-sanitizer here: it comes with the CUDA toolkit")
        return 1
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "bench.engine.check", "--small"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    parent_death.guard()
    sys.exit(main(sys.argv[1:]))
