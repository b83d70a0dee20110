"""What numbers an engine computes with and keeps: from settings and a device to a `Precision`. Torch-free.

    compute   activations, norms, embedding, lm_head
    weights   the linears of the layers: "none" is the compute dtype
    kv        the KV pool

`auto` is what suits the device: bfloat16 on a GPU and on a CPU with instructions for it, else float32; the weights as the files
hold them; KV as computed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from common.protocol.errors import ConfigError

Compute = Literal["float32", "bfloat16", "float16"]
Weights = Literal["none", "int8", "fp8"]
Kv = Literal["float32", "bfloat16", "float16", "fp8"]
DeviceKind = Literal["cpu", "cuda"]

DtypeSetting = Literal["auto", "float32", "bfloat16", "float16"]
QuantizationSetting = Literal["auto", "none", "int8", "fp8"]
KvSetting = Literal["auto", "float32", "bfloat16", "float16", "fp8"]

_CPU_INFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is Arm's

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


class Precision(msgspec.Struct, frozen=True):
    """`name` tells workers apart that must not share KV."""

    compute: Compute
    weights: Weights
    kv: Kv

    @property
    def kv_bytes(self) -> int:
        """Bytes of one number in the KV pool."""
        return _ITEM_BYTES[self.kv]

    @property
    def name(self) -> str:
        return f"{self.compute}/{self.weights}/{self.kv}"


def resolve_precision(
    dtype: DtypeSetting,
    quantization: QuantizationSetting,
    kv_cache_dtype: KvSetting,
    device_kind: DeviceKind,
    *,
    checkpoint: Literal["none", "fp8"] = "none",
) -> Precision:
    """`checkpoint`: how the files hold the linears' weights. FP8 files stay FP8 on a GPU, unless `quantization` is none.

    :raises ConfigError: if the device has no such arithmetic, or the settings contradict each other.
    """
    resolve = _on_cpu if device_kind == "cpu" else _on_cuda
    precision = resolve(dtype, quantization, kv_cache_dtype, checkpoint)
    if precision.kv not in ("fp8", precision.compute):
        raise ConfigError(
            f"kv_cache_dtype {precision.kv} does not go with {precision.compute} compute; use auto or fp8",
            param="kv_cache_dtype",
        )
    return precision


def _on_cpu(dtype: DtypeSetting, quantization: QuantizationSetting, kv_cache_dtype: KvSetting, checkpoint: str) -> Precision:
    """FP8 files are dequantised: `checkpoint` changes nothing."""
    compute: Compute = dtype if dtype != "auto" else "bfloat16" if cpu_has_bfloat16() else "float32"
    if compute == "float16":
        raise ConfigError("dtype float16 is not supported on a CPU; use float32 or bfloat16", param="dtype")
    if quantization in ("fp8", "int8"):
        raise ConfigError(f"quantization {quantization} is not supported on a CPU; use none", param="quantization")
    if kv_cache_dtype == "fp8":
        raise ConfigError("kv_cache_dtype fp8 needs a GPU; on a CPU use auto", param="kv_cache_dtype")
    return Precision(
        compute=compute,
        weights="none" if quantization == "auto" else quantization,
        kv=compute if kv_cache_dtype == "auto" else kv_cache_dtype,
    )


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
    stored: Weights = "fp8" if checkpoint == "fp8" else "none"
    return Precision(
        compute=compute,
        weights=stored if quantization == "auto" else quantization,
        kv=compute if kv_cache_dtype == "auto" else kv_cache_dtype,
    )
