"""How published checkpoints say what their weights are: `quantization_config` of config.json. Torch-free.

    compressed-tensors   float-quantized (FP8), int-quantized (INT8), pack-quantized (INT4, INT8), nvfp4-pack-quantized,
                         mxfp4-pack-quantized
    fbgemm_fp8, fp8      FP8 per channel, per tensor, or in blocks of 128
    awq, gptq            INT4 with zero points; gptq in any order of inputs, and with 8 bits
    bitsandbytes         NF4
    mxfp4                gpt-oss; its experts alone
    modelopt             NVFP4, FP8

Activations are quantised per token where a format's kernel wants them so, never with the fixed scale of a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from common.models.formats.scheme import FormatName, WeightScheme
from common.protocol.errors import ConfigError

FP8_BLOCK = 128
_GROUPS = (16, 32, 64)
_GGUF_BITS = {2: 4, 3: 4, 7: 8, 14: 4, 15: 4, 18: 8, 38: 4}
"""By llama.cpp's `llama_ftype`: Q4_0, Q4_1, Q8_0, Q4_K_S, Q4_K_M, Q6_K, MXFP4 of experts."""
_METHODS = "awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt and mxfp4"


def detect(config: Mapping[str, Any]) -> WeightScheme:
    """`config` is config.json. Which tensors are quantised is up to the files: each format leaves some of them alone.

    :raises ConfigError: for a format that is not supported.
    """
    found = config.get("quantization_config")
    if found is None:
        return WeightScheme()
    if not isinstance(found, Mapping):
        raise ConfigError(f"quantization_config must be an object, not {found!r}")
    match found.get("quant_method"):
        case "compressed-tensors":
            return _compressed_tensors(found)
        case "fbgemm_fp8":
            return WeightScheme(name="fp8", bits=8, ignore=_ignored(found))
        case "fp8":
            return _fp8(found)
        case "awq":
            return _awq(found)
        case "gptq":
            return _gptq(found)
        case "bitsandbytes":
            return _bitsandbytes(found)
        case "mxfp4":
            return WeightScheme(name="mxfp4", bits=4, group=32, ignore=_ignored(found))
        case "modelopt":
            return _modelopt(found)
        case other:
            raise ConfigError(f"quant_method {other!r} is not supported; supported are {_METHODS}")


def gguf_scheme(metadata: Mapping[str, Any]) -> WeightScheme:
    """What a GGUF file's linears are, mostly: each of its tensors has a type of its own. Types that have no kernel are
    dequantised, and so are files that do not say their type."""
    bits = _GGUF_BITS.get(metadata.get("general.file_type", -1))
    return WeightScheme() if bits is None else WeightScheme(name="gguf", bits=bits, group=32)


def _fp8(found: Mapping[str, Any]) -> WeightScheme:
    if found.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(f"FP8 weights of format {found['fmt']!r} are not supported; only e4m3 is")
    block = found.get("weight_block_size")
    if block is None:
        return WeightScheme(name="fp8", bits=8, ignore=_ignored(found))
    _check_block(block)
    return WeightScheme(name="fp8_blocks", bits=8, ignore=_ignored(found))


def _awq(found: Mapping[str, Any]) -> WeightScheme:
    version = str(found.get("version", "gemm")).lower()
    if version != "gemm":
        raise ConfigError(f"AWQ weights of version {version!r} are not supported; only gemm is")
    if found.get("bits", found.get("w_bit", 4)) != 4:
        raise ConfigError(f"AWQ weights of {found.get('bits', found.get('w_bit'))} bits are not supported; 4 are")
    group = found.get("group_size", found.get("q_group_size", 128))
    return WeightScheme(name="awq", bits=4, group=_group_size(group), ignore=_ignored(found))


def _gptq(found: Mapping[str, Any]) -> WeightScheme:
    bits = found.get("bits", 4)
    if bits not in (4, 8):
        raise ConfigError(f"GPTQ weights of {bits} bits are not supported; 4 and 8 are")
    layout = found.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise ConfigError(f"GPTQ weights of checkpoint_format {layout!r} are not supported; gptq and gptq_v2 are")
    if found.get("dynamic"):
        raise ConfigError("GPTQ weights with settings of their own for some modules (dynamic) are not supported")
    return WeightScheme(
        name="gptq",
        bits=bits,
        group=_group_size(found.get("group_size", 128)),
        zero_offset=1 if layout == "gptq" else 0,
        act_order=bool(found.get("desc_act")),
        ignore=_ignored(found),
    )


def _bitsandbytes(found: Mapping[str, Any]) -> WeightScheme:
    if not (found.get("load_in_4bit") or found.get("_load_in_4bit")):
        raise ConfigError("bitsandbytes weights are supported as NF4 only (load_in_4bit)")
    if found.get("bnb_4bit_quant_type", "fp4") != "nf4":
        raise ConfigError(f"bitsandbytes weights of type {found.get('bnb_4bit_quant_type', 'fp4')!r} are not supported; nf4 is")
    return WeightScheme(name="nf4", bits=4, group=64, ignore=_ignored(found))


def _modelopt(found: Mapping[str, Any]) -> WeightScheme:
    match found.get("quant_algo"):
        case "NVFP4":
            return WeightScheme(name="nvfp4", bits=4, group=16, ignore=_wildcards(_ignored(found)))
        case "FP8":
            return WeightScheme(name="fp8", bits=8, ignore=_wildcards(_ignored(found)))
        case other:
            raise ConfigError(f"modelopt weights of quant_algo {other!r} are not supported; NVFP4 and FP8 are")


def _compressed_tensors(found: Mapping[str, Any]) -> WeightScheme:
    if found.get("transform_config"):
        raise ConfigError("compressed-tensors with a transform_config are not supported")
    layout = found.get("format")
    groups = found.get("config_groups")
    if layout not in ("float-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        raise ConfigError(
            f"compressed-tensors of format {layout!r} is not supported; float-quantized, int-quantized, pack-quantized, "
            "nvfp4-pack-quantized and mxfp4-pack-quantized are"
        )
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError("quantization_config has no config_groups")
    schemes = {_compressed_group(group, layout, _ignored(found)) for group in groups.values()}
    if len(schemes) > 1:
        raise ConfigError("compressed-tensors groups of different strategies are not supported")
    return schemes.pop()


def _compressed_group(group: Any, layout: str, ignore: tuple[str, ...]) -> WeightScheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ConfigError("a group of quantization_config has no weights")
    kind, strategy = weights.get("type"), weights.get("strategy")
    bits: Any = weights.get("num_bits")
    if layout == "float-quantized":
        if (kind, bits) != ("float", 8):
            raise ConfigError("compressed-tensors weights are supported as 8-bit floats only")
        return WeightScheme(name=_float_strategy(weights), bits=8, ignore=ignore)
    if layout in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        name, size = ("nvfp4", 16) if layout.startswith("nvfp4") else ("mxfp4", 32)
        if (kind, bits) != ("float", 4) or weights.get("group_size", size) != size:
            raise ConfigError(f"{layout} weights are 4-bit floats in groups of {size}, not {kind} of {bits} bits")
        return WeightScheme(name=name, bits=4, group=size, ignore=ignore)
    if kind != "int" or bits not in ((8,) if layout == "int-quantized" else (4, 8)):
        raise ConfigError(f"compressed-tensors {layout} weights of type {kind!r} and {bits} bits are not supported")
    if strategy not in ("channel", "group", "tensor") or (layout == "int-quantized" and strategy == "group"):
        raise ConfigError(f"compressed-tensors strategy {strategy!r} is not supported for {layout}")
    size = _group_size(weights.get("group_size")) if strategy == "group" else 0
    act_order = weights.get("actorder") in (True, "group", "dynamic")  # "weight", "static": the inputs stay in their order
    name = "int8" if layout == "int-quantized" else "packed"
    return WeightScheme(name=name, bits=bits, group=size, act_order=act_order, ignore=ignore)


def _float_strategy(weights: Mapping[str, Any]) -> FormatName:
    match weights.get("strategy"):
        case "tensor" | "channel":
            return "fp8"
        case "block":
            _check_block(weights.get("block_structure"))
            return "fp8_blocks"
        case other:
            raise ConfigError(f"compressed-tensors strategy {other!r} is not supported; tensor, channel and block are")


def _check_block(block: Any) -> None:
    if block != [FP8_BLOCK, FP8_BLOCK]:
        raise ConfigError(f"FP8 weights in blocks of {block} are not supported; blocks of {FP8_BLOCK}×{FP8_BLOCK} are")


def _group_size(size: Any) -> int:
    """-1 and None: one group for each output, which is 0 here."""
    if size in (None, -1):
        return 0
    if isinstance(size, int) and not isinstance(size, bool) and (size in _GROUPS or (size > 0 and size % 128 == 0)):
        return size
    raise ConfigError(f"weights in groups of {size!r} are not supported; groups of 16, 32, 64 and multiples of 128 are")


def _ignored(found: Mapping[str, Any]) -> tuple[str, ...]:
    """What is not quantised, under any of its names.

    :raises ConfigError: if it is no list of names, or a pattern can't be read."""
    for key in ("ignore", "modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers", "exclude_modules"):
        listed = found.get(key)
        if listed is None:
            continue
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise ConfigError(f"{key} of quantization_config must be a list of names, not {listed!r}")
        for pattern in listed:
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    raise ConfigError(f"{pattern!r} in {key} is no regular expression: {error}") from error
        return tuple(listed)
    return ()


def _wildcards(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names in which * stands for anything, as patterns."""
    return tuple(f"re:{re.escape(name).replace(re.escape('*'), '.*')}$" if "*" in name else name for name in names)
