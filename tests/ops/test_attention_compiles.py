"""Attention compiles for Hopper and Blackwell as it is launched: 16-byte asynchronous copies, tensor cores, no spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.ops.attention.configs import SHORT_QUERIES, AttentionConfig, choose_config, default_config
from common.ops.attention.form import AttentionForm
from tests.ops.compiling import ARCHITECTURES, Builds, KernelCase, check, compile_cases

_PDL = ("griddepcontrol.wait", "griddepcontrol.launch_dependents")
_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}
_LAYERS, _BLOCK_TOKENS, _KV_HEADS = 32, 16, 8


PLAIN = AttentionForm(1.0)
WINDOWED = AttentionForm(1.0, window=128, sinks=torch.zeros(1))
CAPPED = AttentionForm(1.0, window=4096, soft_cap=50.0)


def _attention(
    name: str,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    max_queries: int,
    config: AttentionConfig,
    max_registers: int = 255,
    form: AttentionForm = PLAIN,
) -> KernelCase:
    kv8 = dtype == torch.float8_e4m3fn
    compute = "bf16" if kv8 else _NAMES[dtype]
    segment = config.segment_keys // config.tile
    signature = {
        "query": f"*{compute}",
        "pool": "*i16" if kv8 else f"*{compute}",
        "output": f"*{compute}",
        "partials": "*fp32",
        "sums": "*fp32",
        "items": "*i32",
        "counts": "*i32",
        "block_ids": "*i32",
        "query_starts": "*i32",
        "layer": "i32",
        "scale": "fp32",
        "soft_cap": "fp32",
        "window": "i32",
        "chunk": "i32",
        "query_stride": "i32:16",
        "num_rows": "i32",
        "end_token": "i32",
    }
    absent: dict[str, int | float | bool | str | None] = {}
    pointers = (("kv_scale", "*fp32", kv8), ("arrivals", "*i32", config.fused), ("sinks", "*fp32", form.sinks is not None))
    for parameter, kind, there in pointers:
        if there:
            signature[parameter] = kind
        else:
            absent[parameter] = None
    tensor_cores = ("wgmma",) if config.block_m >= 64 or config.swap else ("mma.sync",)
    return KernelCase(
        f"{name}-{head_dim}-group{group}-{_NAMES[dtype]}",
        "common.ops.attention.paged_triton",
        "attention_kernel",
        signature,
        absent
        | {
            "KV_HEADS": _KV_HEADS,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SHIFT": _BLOCK_TOKENS.bit_length() - 1,
            "BLOCK_STRIDE": _LAYERS * 2 * _BLOCK_TOKENS * _KV_HEADS * head_dim // (2 if kv8 else 1),
            "BLOCK_M": config.block_m,
            "TILE": config.tile,
            "SLOT_ROWS": min(config.block_m // group, max_queries) * group,
            "SEGMENT": segment,
            "KV8": kv8,
            "ASSEMBLY": True,
            "SCALED": kv8,
            "SWAP": config.swap,
            "OPEN_LOOP": max_queries > SHORT_QUERIES and not segment and not any(form.reach),
            "FUSED": config.fused,
            "PREFETCH": config.prefetch,
            "LOOP": segment > 0,
            "LIMITED": any(form.reach),
            "CAPPED": form.soft_cap > 0,
            "SINKS": form.sinks is not None,
            "PDL": True,
        },
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=not segment,
        expects=(*_PDL, "cp.async"),
        expects_90=tensor_cores if dtype != torch.float32 else (),
        max_registers=max_registers,
    )


FEW = 0.1


def _chosen(
    kind: str, head_dim: int, dtype: torch.dtype, group: int = 4, max_registers: int = 255, rows_per_sm: float = FEW
) -> KernelCase:
    queries = {"decode": 1, "verify": 5, "prefill": 8192, "invariant": 8192}[kind]
    config = choose_config(head_dim, group, dtype, queries, rows_per_sm=rows_per_sm, invariant=kind == "invariant")
    name = kind if rows_per_sm == FEW else f"{kind}-{rows_per_sm:g}-rows-per-sm"
    return _attention(name, head_dim, group, dtype, queries, config, max_registers)


_DECODE = default_config(128, 4, torch.bfloat16, "decode")

CASES = [
    _chosen("decode", 128, torch.bfloat16, max_registers=168),  # three programs of 128 threads share a multiprocessor
    _chosen("decode", 128, torch.bfloat16, rows_per_sm=2),
    _chosen("decode", 128, torch.bfloat16, rows_per_sm=4),
    _chosen("decode", 128, torch.bfloat16, rows_per_sm=10),
    _chosen("decode", 128, torch.float8_e4m3fn, rows_per_sm=10),
    _chosen("decode", 64, torch.bfloat16, group=3, max_registers=168),
    _chosen("decode", 80, torch.bfloat16, group=1),
    _chosen("decode", 256, torch.bfloat16),
    _chosen("decode", 128, torch.float8_e4m3fn, max_registers=168),
    _chosen("verify", 128, torch.bfloat16),
    _chosen("verify", 128, torch.float8_e4m3fn),
    _chosen("verify", 128, torch.float8_e4m3fn, group=8),
    replace(_chosen("prefill", 128, torch.bfloat16), stack_bytes=16),  # the fastest, nonetheless
    _chosen("prefill", 256, torch.bfloat16),
    _chosen("prefill", 128, torch.float8_e4m3fn),
    _chosen("invariant", 128, torch.bfloat16),
    _chosen("decode", 64, torch.float32, group=3),
    _attention("fused", 128, 4, torch.bfloat16, 1, replace(_DECODE, fused=True, prefetch=2), 168),
    _attention("window", 64, 8, torch.bfloat16, 1, default_config(64, 8, torch.bfloat16, "decode"), form=WINDOWED),
    _attention("window", 64, 8, torch.float8_e4m3fn, 1, default_config(64, 8, torch.float8_e4m3fn, "decode"), form=WINDOWED),
    _attention("window-prefill", 64, 8, torch.bfloat16, 8192, default_config(64, 8, torch.bfloat16, "prefill"), form=WINDOWED),
    _attention("cap", 256, 2, torch.bfloat16, 1, default_config(256, 2, torch.bfloat16, "decode"), form=CAPPED),
    replace(
        _attention("cap-prefill", 256, 2, torch.bfloat16, 8192, default_config(256, 2, torch.bfloat16, "prefill"), form=CAPPED),
        stack_bytes=16,
    ),
    _attention("plain", 96, 4, torch.bfloat16, 1, default_config(96, 4, torch.bfloat16, "decode")),
    _attention("swapped", 128, 4, torch.bfloat16, 1, replace(_DECODE, swap=True), 168),
    *(
        KernelCase(
            name,
            "common.ops.attention.merge_triton",
            "merge_kernel",
            {
                "output": "*bf16",
                "partials": "*fp32",
                "sums": "*fp32",
                "merges": "*i32",
                "counts": "*i32",
                **({"sinks": "*fp32"} if name == "sinks" else {}),
            },
            ({} if name == "sinks" else {"sinks": None})
            | {
                "KV_HEADS": 8,
                "GROUP": 4,
                "HEAD_DIM": 128,
                "SLOT_ROWS": 4,
                "PARTS": 32 if name == "few_rows" else 8,
                "IN_ORDER": name == "in_order",
                "SINKS": name == "sinks",
                "PDL": True,
            },
            num_warps=1,
            expects=_PDL,
            max_registers=255 if name == "few_rows" else 128,
        )
        for name in ("at_once", "few_rows", "in_order", "sinks")
    ),
    KernelCase(
        "512_rows",
        "common.ops.attention.work_triton",
        "work_kernel",
        {
            **dict.fromkeys(("query_starts", "context_lens", "block_starts", "items", "merges", "counts"), "*i32"),
            **dict.fromkeys(("num_rows", "max_items", "max_merges", "target_items", "min_tiles_per_split"), "i32"),
            **dict.fromkeys(("min_queries", "max_queries", "fresh_prefill_min", "part_min_queries"), "i32"),
            **dict.fromkeys(("part_min_prefix", "query_tile", "tile", "window", "chunk"), "i32"),
        },
        {"ROWS": 512, "ITEMS": 32, "SEGMENT": 0, "EVEN": True},
        num_warps=8,
    ),
    *(
        KernelCase(
            f"merge_pair_{dtype[1:]}_{head_dim}",
            "common.ops.attention.merge_pair_triton",
            "merge_pair_kernel",
            {
                "first": dtype,
                "second": "*bf16",
                "output": "*bf16",
                **dict.fromkeys(("first_sums", "second_sums", "output_sums"), "*fp32"),
                **dict.fromkeys(("tokens", "first_stride", "second_stride", "first_sums_stride", "second_sums_stride"), "i32"),
            },
            {"HEADS": 32, "HEAD_DIM": head_dim, "ROWS": 16},
            max_registers=128,
        )
        for dtype, head_dim in (("*bf16", 128), ("*fp32", 128), ("*fp32", 80))
    ),
]


@pytest.fixture(scope="module")
def builds() -> Builds:
    return compile_cases(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: KernelCase, arch: int, builds: Builds) -> None:
    check(case, arch, builds)
