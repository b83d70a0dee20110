"""What numbers an engine computes with and keeps: from settings and a device to a `Precision`. Torch-free.

    compute   activations, norms, embedding, lm_head
    weights   the linears of the layers: "none" is the compute dtype, "groups" 4 or 8 bits as the files hold them; in FP8 the
              lm_head as well, where that costs little enough (`fp8_choice`)
    kv        the KV pool

`auto` is what suits the device. On a GPU: bfloat16, weights as the files hold them. On a CPU: 8-bit weights and
bfloat16 KV, everything else in float32; `--dtype float32` is float32 throughout. KV as computed otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from common.protocol.errors import ConfigError

Compute = Literal["float32", "bfloat16", "float16"]
Weights = Literal["none", "int8", "fp8", "groups"]
Kv = Literal["float32", "bfloat16", "float16", "fp8"]
DeviceKind = Literal["cpu", "cuda"]

DtypeSetting = Literal["auto", "float32", "bfloat16", "float16"]
QuantizationSetting = Literal["auto", "none", "int8", "fp8"]
KvSetting = Literal["auto", "float32", "bfloat16", "float16", "fp8"]

FP8_SINCE = 9, 0
"""The first GPU whose FP8 kernels are tested here."""
_CPU_INFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is Arm's

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


class Precision(msgspec.Struct, frozen=True):
    """`name` tells workers apart that must not share KV. FP8 keys are centred and Hadamard-rotated
    (`ops.kv.qkv_rope`), which it says: those of a version that stored them as they were must not meet them."""

    compute: Compute
    weights: Weights
    kv: Kv

    @property
    def kv_bytes(self) -> int:
        """Bytes of one number in the KV pool."""
        return _ITEM_BYTES[self.kv]

    @property
    def name(self) -> str:
        return f"{self.compute}/{self.weights}/{self.kv}{'-mixed' if self.kv == 'fp8' else ''}"


def resolve_precision(
    dtype: DtypeSetting,
    quantization: QuantizationSetting,
    kv_cache_dtype: KvSetting,
    device_kind: DeviceKind,
    *,
    checkpoint: Literal["none", "fp8", "groups"] = "none",
    int8_lacks: Sequence[str] = (),
) -> Precision:
    """`checkpoint`: how the files hold the linears' weights. On a GPU they stay so, unless `quantization` says otherwise.
    `int8_lacks`: what the 8-bit engine can't compute of the model; then `auto` is not 8-bit.

    :raises ConfigError: if the device has no such arithmetic, or the settings contradict each other.
    """
    if device_kind == "cpu":
        precision = _on_cpu(dtype, quantization, kv_cache_dtype, int8_lacks)
    else:
        precision = _on_cuda(dtype, quantization, kv_cache_dtype, checkpoint)
    if precision.kv not in ("fp8", precision.compute) and precision.weights != "int8":
        raise ConfigError(
            f"kv_cache_dtype {precision.kv} does not go with {precision.compute} compute; use auto or fp8",
            param="kv_cache_dtype",
        )
    return precision


def _on_cpu(
    dtype: DtypeSetting, quantization: QuantizationSetting, kv_cache_dtype: KvSetting, int8_lacks: Sequence[str]
) -> Precision:
    """How the files hold the weights changes nothing: they are dequantised."""
    if dtype == "float16":
        raise ConfigError("dtype float16 is not supported on a CPU; use float32 or bfloat16", param="dtype")
    if quantization == "fp8":
        raise ConfigError("quantization fp8 needs a GPU; on a CPU use int8 or none", param="quantization")
    if quantization == "int8" and (dtype == "bfloat16" or not has_int8()):
        reason = "goes with dtype float32 or auto" if has_int8() else "needs the package numba"
        raise ConfigError(f"quantization int8 {reason}", param="quantization")
    if quantization == "int8" and int8_lacks:
        raise ConfigError(f"quantization int8 lacks {', '.join(int8_lacks)}; use none or auto", param="quantization")
    if kv_cache_dtype == "fp8":
        raise ConfigError("kv_cache_dtype fp8 needs a GPU; on a CPU use auto", param="kv_cache_dtype")
    weights: Weights = "int8" if quantization == "int8" else "none"
    if dtype == "auto" and quantization == "auto" and has_int8() and not int8_lacks:
        weights = "int8"
    suiting: Compute = "bfloat16" if weights == "none" and cpu_has_bfloat16() else "float32"
    compute = suiting if dtype == "auto" else dtype
    suits: Kv = "bfloat16" if weights == "int8" else compute
    if weights == "int8" and kv_cache_dtype not in ("auto", suits):
        raise ConfigError(f"kv_cache_dtype {kv_cache_dtype} does not go with int8 weights; use auto", param="kv_cache_dtype")
    return Precision(compute=compute, weights=weights, kv=suits if kv_cache_dtype == "auto" else kv_cache_dtype)


@cache
def has_int8() -> bool:
    """Can 8-bit linears be compiled here?"""
    return find_spec("numba") is not None


@cache
def cpu_has_bfloat16() -> bool:
    """Does this CPU multiply bfloat16? Where it only converts, bfloat16 is slower than float32."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return False
    return any(not _BFLOAT16_FLAGS.isdisjoint(line.split()) for line in lines if line.startswith(("flags", "Features")))


def _on_cuda(dtype: DtypeSetting, quantization: QuantizationSetting, kv_cache_dtype: KvSetting, checkpoint: str) -> Precision:
    if quantization == "int8":
        raise ConfigError("quantization int8 is for CPUs; on a GPU use fp8 or none", param="quantization")
    compute: Compute = "bfloat16" if dtype == "auto" else dtype
    stored: Weights = "none" if checkpoint == "none" else "fp8" if checkpoint == "fp8" else "groups"
    return Precision(
        compute=compute,
        weights=stored if quantization == "auto" else quantization,
        kv=compute if kv_cache_dtype == "auto" else kv_cache_dtype,
    )
