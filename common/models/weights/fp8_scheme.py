"""How published checkpoints say that their weights are FP8: `quantization_config` of config.json. Torch-free.

    compressed-tensors   float-quantized: weight F8_E4M3, weight_scale per tensor or per channel (or in blocks of 128)
    fbgemm_fp8           the same, per channel; some layers stay as they were
    fp8                  weight_scale_inv in blocks of 128 (DeepSeek, Qwen3), or weight_scale per tensor (AutoFP8)

Whatever the name, a weight is `data · scale`. Activations are always quantised per token, when they come: that is what
most of these checkpoints ask for, and closer than the fixed scale of the others, which is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from common.protocol.errors import ConfigError

WeightFormat = Literal["plain", "fp8", "fp8_blocks"]

BLOCK = 128


def weight_format(config: Mapping[str, Any]) -> WeightFormat:
    """`config` is config.json. Which tensors are FP8 is up to the files: each scheme leaves some of them alone.

    :raises ConfigError: for any other scheme.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return "plain"
    if not isinstance(quantization, Mapping):
        raise ConfigError(f"quantization_config must be an object, not {quantization!r}")
    match quantization.get("quant_method"):
        case "compressed-tensors":
            return _compressed_tensors(quantization)
        case "fbgemm_fp8":
            return "fp8"
        case "fp8":
            return _fp8(quantization)
        case other:
            raise ConfigError(
                f"quant_method {other!r} is not supported; supported are compressed-tensors (FP8), fbgemm_fp8 and fp8"
            )


def _fp8(quantization: Mapping[str, Any]) -> WeightFormat:
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(f"FP8 weights of format {quantization['fmt']!r} are not supported; only e4m3 is")
    block = quantization.get("weight_block_size")
    if block is None:
        return "fp8"
    _check_block(block)
    return "fp8_blocks"


def _compressed_tensors(quantization: Mapping[str, Any]) -> WeightFormat:
    if quantization.get("format") != "float-quantized":
        raise ConfigError(f"compressed-tensors of format {quantization.get('format')!r} is not supported; float-quantized is")
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError("quantization_config has no config_groups")
    found: set[WeightFormat] = {_group(group) for group in groups.values()}
    if len(found) > 1:
        raise ConfigError("compressed-tensors groups of different strategies are not supported")
    return found.pop()


def _group(group: Any) -> WeightFormat:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        raise ConfigError("compressed-tensors weights are supported as 8-bit floats only")
    match weights.get("strategy"):
        case "tensor" | "channel":
            return "fp8"
        case "block":
            _check_block(weights.get("block_structure"))
            return "fp8_blocks"
        case other:
            raise ConfigError(f"compressed-tensors strategy {other!r} is not supported; tensor, channel and block are")


def _check_block(block: Any) -> None:
    if block != [BLOCK, BLOCK]:
        raise ConfigError(f"FP8 weights in blocks of {block} are not supported; blocks of {BLOCK}×{BLOCK} are")
