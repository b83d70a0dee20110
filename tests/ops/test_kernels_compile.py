"""The small kernels compile for Hopper and Blackwell: 16-byte accesses, no spills, programmatic dependent launch."""

from __future__ import annotations

import dataclasses

import pytest

from tests.ops.compiling import ARCHITECTURES, Builds, KernelCase, check, compile_cases

_PDL = ("griddepcontrol.wait", "griddepcontrol.launch_dependents")
_WIDE = ("ld.global.v4", "st.global.v4")


def _add_rms_norm(
    size: int, splits: int, dtype: str = "bf16", quantise: bool = False, elements: int = 8, norms: str = "before"
) -> KernelCase:
    """norms: "before", "sandwich" or "post"."""
    block = 1 << (size - 1).bit_length()
    partial = dtype if splits <= 1 else "fp32"
    signature = {
        "residual": f"*{dtype}",
        "weight": f"*{dtype}",
        "output": "*fp8e4nv" if quantise else f"*{dtype}",
        "eps": "fp32",
    }
    if splits:
        signature |= {"delta": f"*{partial}", "split_stride": "i32:16", "row_stride": "i32:16"}
    if quantise:
        signature |= {"scale": "*fp32"}
    if norms != "before":
        signature |= {"behind": f"*{dtype}"}
    if norms == "post":
        del signature["weight"], signature["output"]
    absent = {name: None for name in ("delta", "scale", "weight", "behind", "output") if name not in signature}
    absent |= {} if splits else {"split_stride": 0, "row_stride": 0}
    return KernelCase(
        f"{size}-{splits}-{dtype}{'-fp8' if quantise else ''}-{elements}-{norms}",
        "common.ops.norm.add_rms_norm_triton",
        "add_rms_norm_kernel",
        signature,
        {**absent, "SIZE": size, "BLOCK": block, "SPLITS": splits, "QUANTISE": quantise, "PDL": True},
        num_warps=min(32, max(1, block // (32 * elements))),
        expects=(*_PDL, "ld.global.v4") if quantise or elements < 8 else (*_PDL, *_WIDE),
        forbids=("fused",),
        max_registers=128,
        enable_fp_fusion=False,
    )


def _qkv_rope(
    name: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    splits: int = 1,
    dtype: str = "bf16",
    pool: str = "bf16",
    normed: bool = False,
    biased: bool = False,
    scaled: bool = False,
    mixed: bool = False,
    need_kv: bool = False,
    rotated: int | None = None,
    interleaved: bool = False,
    tempered: bool = False,
    num_warps: int = 1,
) -> KernelCase:
    half = max(16, 1 << (head_dim // 2 - 1).bit_length())
    group = min(max(1, num_warps * 256 // half), 1 << (heads - 1).bit_length())
    signature = {
        "qkv": "*fp32" if splits > 1 else f"*{dtype}",
        "positions": "*i32",
        "rope": "*fp32",
        "pool": f"*{pool}",
        "slots": "*i64",
        "query": f"*{dtype}",
        "split_stride": "i32:16",
        "row_stride": "i32:16",
        "eps": "fp32",
        "layer": "i32",
        "temperature_scale": "fp32",
        "temperature_floor": "fp32",
        "temperature_shift": "fp32",
    }
    if rotated == 0:
        del signature["rope"]
    signature |= {"q_norm": f"*{dtype}", "k_norm": f"*{dtype}"} if normed else {}
    signature |= {"bias": f"*{dtype}"} if biased else {}
    signature |= {"kv_scale": "*fp32"} if scaled else {}
    signature |= {"k_center": "*fp32"} if mixed else {}
    signature |= {"key": f"*{dtype}", "value": f"*{dtype}"} if need_kv else {}
    optional = ("rope", "q_norm", "k_norm", "bias", "kv_scale", "k_center", "key", "value")
    return KernelCase(
        name,
        "common.ops.kv.qkv_rope_triton",
        "qkv_rope_kernel",
        signature,
        {
            **{name: None for name in optional if name not in signature},
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "LAYERS": 32,
            "BLOCK_TOKENS": 16,
            "GROUP": group,
            "HALF_BLOCK": half,
            "SPLITS": splits,
            "DTYPE": {"bf16": "tl.bfloat16", "fp16": "tl.float16"}[dtype],
            "ROTATED": head_dim if rotated is None else rotated,
            "INTERLEAVED": interleaved,
            "NORMED": normed or tempered,
            "TEMPERED": tempered,
            "MIX": mixed,
            "NEED_KV": need_kv,
            "PDL": True,
        },
        num_warps=num_warps,
        expects=(*_PDL, *_WIDE) if head_dim > 32 else (*_PDL, "ld.global.v4"),
        forbids=() if tempered else ("fused",),  # a logarithm is a polynomial
        max_registers=128,
        enable_fp_fusion=False,
    )


def _copy_blocks(
    name: str,
    block_bytes: int,
    sides: tuple[str, ...],
    chunk: int = 4096,
    num_warps: int = 4,
    num_chunks: int | None = None,
) -> KernelCase:
    """num_chunks: 1 is a constant to Triton."""
    words = block_bytes // 4
    return KernelCase(
        name,
        "common.ops.kv.block_copy_triton",
        "copy_blocks_kernel",
        {"source": "*i32", "target": "*i32", "num_chunks": "i32", **dict.fromkeys(sides, "*i64")},
        {
            **{side: None for side in ("source_ids", "target_ids") if side not in sides},
            "WORDS": words,
            "CHUNK": min(chunk, 1 << (words - 1).bit_length()),
        },
        num_warps=num_warps,
        expects=_WIDE,
        max_registers=128,
    )


def _block_crc(name: str, block_bytes: int, lanes: int = 4096, num_warps: int = 8) -> KernelCase:
    return KernelCase(
        name,
        "common.ops.kv.block_crc_triton",
        "block_crc_kernel",
        {"pool": "*i32", "block_ids": "*i64", "out": "*i32", "weights": "*i32", "num_blocks": "i32", "step": "i32"},
        {"WORDS": block_bytes // 4, "LANES": min(lanes, 1 << (block_bytes // 4 - 1).bit_length())},
        num_warps=num_warps,
        expects=("ld.global.v4",) if block_bytes // 4 % lanes == 0 else (),
        max_registers=168,
    )


_CHUNKS = ((2048, 4), (4096, 8), (8192, 8))  # with (4096, 4) the candidates

CASES = [
    *(_add_rms_norm(size, 4) for size in (576, 2048, 4096, 5120, 8192)),
    *(_add_rms_norm(4096, 4, elements=elements) for elements in (4, 16)),
    _add_rms_norm(4096, 0),
    _add_rms_norm(4096, 1),
    _add_rms_norm(4096, 16),
    _add_rms_norm(4096, 4, "fp16"),
    _add_rms_norm(4096, 4, quantise=True),
    _add_rms_norm(5120, 1, quantise=True),
    _add_rms_norm(3584, 4, norms="sandwich"),
    _add_rms_norm(3584, 1, quantise=True, norms="sandwich"),
    _add_rms_norm(4096, 4, norms="post"),
    _qkv_rope("llama-8b", 32, 8, 128),
    _qkv_rope("llama-8b-split", 32, 8, 128, splits=4),
    _qkv_rope("llama-8b-split-fp8", 32, 8, 128, splits=4, pool="fp8e4nv", scaled=True),
    _qkv_rope("llama-8b-prefill", 32, 8, 128, need_kv=True, num_warps=4),
    _qkv_rope("llama-1b-split", 32, 8, 64, splits=4),
    _qkv_rope("qwen3-8b-split", 32, 8, 128, splits=4, normed=True),
    _qkv_rope("qwen3-32b", 64, 8, 128, normed=True),
    _qkv_rope("qwen3-prefill-fp8", 32, 8, 128, pool="fp8e4nv", normed=True, need_kv=True, num_warps=4),
    _qkv_rope("smollm2-split", 9, 3, 64, splits=2),
    _qkv_rope("smollm2-fp16", 9, 3, 64, dtype="fp16", pool="fp16"),
    _qkv_rope("gpt-oss-split", 64, 8, 64, splits=4, biased=True),
    _qkv_rope("phi-4-mini", 24, 8, 128, rotated=96),
    _qkv_rope("llama-4", 40, 8, 128, interleaved=True),
    _qkv_rope("glm-4", 32, 2, 128, rotated=64, interleaved=True),
    _qkv_rope("llama-4-nope", 40, 8, 128, rotated=0, tempered=True),
    _qkv_rope("biased", 28, 4, 128, biased=True),
    _qkv_rope("80", 8, 8, 80, splits=2),
    _qkv_rope("32", 8, 2, 32),
    _qkv_rope("256", 8, 2, 256, normed=True),
    _qkv_rope("llama-8b-split-mixed", 32, 8, 128, splits=4, pool="fp8e4nv", scaled=True, mixed=True),
    _qkv_rope("llama-8b-mixed", 32, 8, 128, pool="fp8e4nv", mixed=True),
    _qkv_rope("llama-8b-prefill-mixed", 32, 8, 128, pool="fp8e4nv", mixed=True, need_kv=True, num_warps=4),
    _qkv_rope("qwen3-8b-split-mixed", 32, 8, 128, splits=4, pool="fp8e4nv", normed=True, mixed=True),
    _qkv_rope("qwen3-prefill-mixed", 32, 8, 128, pool="fp8e4nv", normed=True, mixed=True, need_kv=True, num_warps=4),
    _qkv_rope("smollm2-split-mixed", 9, 3, 64, splits=2, pool="fp8e4nv", mixed=True),
    _qkv_rope("80-mixed", 8, 8, 80, splits=2, pool="fp8e4nv", mixed=True),
    _qkv_rope("256-mixed", 8, 2, 256, pool="fp8e4nv", normed=True, mixed=True),
    _copy_blocks("gather-2mb", 2 << 20, ("source_ids",)),
    _copy_blocks("scatter-2mb", 2 << 20, ("target_ids",)),
    _copy_blocks("pools-odd", 16400, ("source_ids", "target_ids")),
    _block_crc("2mb", 2 << 20),
    _block_crc("odd", 262148),
    _block_crc("8192x8", 2 << 20, 8192, 8),
    _copy_blocks("one", 16384, ("source_ids",), num_chunks=1),
    *(_copy_blocks(f"{chunk}x{warps}", 2 << 20, ("source_ids", "target_ids"), chunk, warps) for chunk, warps in _CHUNKS),
]


_SPILLING = dataclasses.replace(_add_rms_norm(8192, 4), name="spilling", num_warps=2, maxnreg=64)
_BROKEN = dataclasses.replace(_add_rms_norm(64, 0), name="broken", constants={"SIZE": 64})


@pytest.fixture(scope="module")
def builds() -> Builds:
    return compile_cases([*CASES, _SPILLING, _BROKEN])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: KernelCase, arch: int, builds: Builds) -> None:
    check(case, arch, builds)


def test_the_check_sees_spills_and_errors(builds: Builds) -> None:
    with pytest.raises(AssertionError, match="spills"):
        check(_SPILLING, 90, builds)
    with pytest.raises(AssertionError, match="Error"):
        check(_BROKEN, 90, builds)
