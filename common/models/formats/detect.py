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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from common.models.fields import Fields
from common.models.formats import harmless
from common.models.formats.scheme import FormatName, WeightScheme
from common.protocol.errors import ConfigError

FP8_BLOCK = 128
_GROUPS = (16, 32, 64)
_MAX_PATTERN, _MAX_QUANTIFIERS, _MAX_PATTERN_GROUPS = 1000, 5, 8
"""Of a regular expression that names modules. With no repeated group, so many quantifiers bound the steps of a match of a
name of n characters by about n^5: what `re` does with nested ones grows exponentially. `?` and those of digits count half:
numbers in a name are shorter than √n."""
_OPAQUE = re.compile(r"\\.|\[\^?\]?[^]]*\]|\{\d*,?\d*\}")
"""Parts of a regular expression that hold no quantifiers: escapes, sets of characters, numbers of repetitions."""
_QUANTIFIER = re.compile(r"(.?)(?:([*+{])|(?<!\()\?)[?+]?")
_GGUF_BITS = {2: 4, 3: 4, 7: 8, 14: 4, 15: 4, 18: 8, 38: 4}
"""By llama.cpp's `llama_ftype`: Q4_0, Q4_1, Q8_0, Q4_K_S, Q4_K_M, Q6_K, MXFP4 of experts."""
_LAYOUTS = ("float-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
_METHODS = "awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt and mxfp4"


def detect(config: Mapping[str, Any]) -> WeightScheme:
    """`config` is config.json. Which tensors are quantised is up to the files: each format leaves some of them alone.

    :raises ConfigError: for a format that is not supported, or a key that its reader does not know.
    """
    data = _quantization_of(config)
    if data is None:
        return WeightScheme()
    if not isinstance(data, Mapping):
        raise ConfigError(f"quantization_config must be an object, not {data!r}")
    found = _fields(data, "quantization_config")
    method = data.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ConfigError(f"quant_method {method!r} is not supported; supported are {_METHODS}")
    return reader(found)


def _quantization_of(config: Mapping[str, Any]) -> Any:
    """What compressed-tensors called `compression_config` at first has the same keys.

    :raises ConfigError: if the two are there and differ.
    """
    found, older = config.get("quantization_config"), config.get("compression_config")
    if older is None or older == found:
        return found
    if found is not None:
        raise ConfigError("config.json has a quantization_config and a compression_config, which differ")
    return {"quant_method": "compressed-tensors", **older} if isinstance(older, Mapping) else older


def _fields(data: Mapping[str, Any], where: str) -> Fields:
    return Fields(data, where, "this server")


def gguf_scheme(metadata: Mapping[str, Any]) -> WeightScheme:
    """What a GGUF file's linears are, mostly: each of its tensors has a type of its own. Types that have no kernel are
    dequantised, and so are files that do not say their type."""
    kind = metadata.get("general.file_type")
    bits = _GGUF_BITS.get(kind) if isinstance(kind, int) else None
    return WeightScheme() if bits is None else WeightScheme(name="gguf", bits=bits, group=32)


def _fp8(found: Fields) -> WeightScheme:
    found.only("fmt", "e4m3")
    found.only("expert_dtype", "fp8")
    block = found.get("weight_block_size")
    if block is not None:
        _check_block(block)
    ignore = _ignored(found)
    found.check_read(harmless.FP8, {})
    return WeightScheme(name="fp8" if block is None else "fp8_blocks", bits=8, ignore=ignore)


def _mxfp4(found: Fields) -> WeightScheme:
    ignore = _ignored(found)
    found.check_read(harmless.MXFP4, {})
    return WeightScheme(name="mxfp4", bits=4, group=32, ignore=ignore)


def _awq(found: Fields) -> WeightScheme:
    version = str(found.get("version", found.get("format", "gemm"))).lower()
    if version != "gemm":
        raise ConfigError(f"AWQ weights of version {version!r} are not supported; only gemm is")
    bits = found.size("bits", found.size("w_bit", 4))
    if bits != 4:
        raise ConfigError(f"AWQ weights of {bits} bits are not supported; 4 are")
    group = found.get("group_size", found.get("q_group_size", 128))
    ignore = _ignored(found)
    found.check_read(harmless.AWQ, {})
    return WeightScheme(name="awq", bits=4, group=_group_size(group), ignore=ignore)


def _gptq(found: Fields) -> WeightScheme:
    bits = found.size("bits", 4)
    if bits not in (4, 8):
        raise ConfigError(f"GPTQ weights of {bits} bits are not supported; 4 and 8 are")
    layout = found.get("checkpoint_format", found.get("format", "gptq"))
    if layout not in ("gptq", "gptq_v2"):
        raise ConfigError(f"GPTQ weights of checkpoint_format {layout!r} are not supported; gptq and gptq_v2 are")
    found.only("pack_dtype", "int32")
    group, act_order = found.get("group_size", 128), found.flag("desc_act")
    ignore = tuple(dict.fromkeys(_ignored(found) + _excluded(found)))
    found.check_read(harmless.GPTQ, {})
    return WeightScheme(
        name="gptq",
        bits=bits,
        group=_group_size(group),
        zero_offset=1 if layout == "gptq" else 0,
        act_order=act_order,
        ignore=ignore,
    )


def _excluded(found: Fields) -> tuple[str, ...]:
    """Return the modules that GPTQModel's `dynamic` excludes, as patterns.

    :raises ConfigError: if it has settings of their own for some modules.
    """
    dynamic = found.get("dynamic", {})
    if not isinstance(dynamic, Mapping) or any(not name.startswith("-:") or value for name, value in dynamic.items()):
        raise ConfigError("GPTQ weights with settings of their own for some modules (dynamic) are not supported")
    patterns = tuple(f"re:{name.removeprefix('-:')}" for name in dynamic)
    _check_patterns("dynamic", patterns)
    return patterns


def _bitsandbytes(found: Fields) -> WeightScheme:
    if not (found.get("load_in_4bit") or found.get("_load_in_4bit")):
        raise ConfigError("bitsandbytes weights are supported as NF4 only (load_in_4bit)")
    kind = found.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        raise ConfigError(f"bitsandbytes weights of type {kind!r} are not supported; nf4 is")
    ignore = _ignored(found)
    found.check_read(harmless.BITSANDBYTES, {})
    return WeightScheme(name="nf4", bits=4, group=64, ignore=ignore)


def _modelopt(found: Fields) -> WeightScheme:
    algorithm = found.get("quant_algo")
    if algorithm not in ("NVFP4", "FP8"):
        raise ConfigError(f"modelopt weights of quant_algo {algorithm!r} are not supported; NVFP4 and FP8 are")
    bits, size = (4, 16) if algorithm == "NVFP4" else (8, 0)
    for weights in _groups(found, ""):
        weights.only("num_bits", bits)
        weights.only("type", "float")
        if size:
            weights.only("group_size", size)
        weights.check_read(harmless.WEIGHTS, {})
    if size:
        found.only("group_size", size)
    ignore = _ignored(found)
    found.check_read(harmless.MODELOPT, {})
    return WeightScheme(name="nvfp4" if size else "fp8", bits=bits, group=size, ignore=ignore)


def _compressed_tensors(found: Fields) -> WeightScheme:
    if found.get("transform_config"):
        raise ConfigError("quantization_config.transform_config is not supported: its weights are rotated")
    _check_dense(found.get("sparsity_config", {}))
    layout = found.get("format")
    if layout not in _LAYOUTS:
        raise ConfigError(f"compressed-tensors of format {layout!r} is not supported; {', '.join(_LAYOUTS)} are")
    ignore = _ignored(found)
    schemes = {_compressed_group(weights, layout, ignore) for weights in _groups(found, layout)}
    if not schemes:
        raise ConfigError("quantization_config has no config_groups")
    if len(schemes) > 1:
        raise ConfigError("compressed-tensors groups of different strategies are not supported")
    found.check_read(harmless.COMPRESSED_TENSORS, {})
    return schemes.pop()


def _check_dense(sparsity: Any) -> None:
    """:raises ConfigError: unless a `sparsity_config` says that weights are stored in full."""
    if not isinstance(sparsity, Mapping):
        raise ConfigError(f"sparsity_config of quantization_config must be an object, not {sparsity!r}")
    found = _fields(sparsity, "quantization_config.sparsity_config")
    layout = found.get("format", "dense")
    if layout != "dense":
        raise ConfigError(f"a sparsity_config of format {layout!r} is not supported: its weights are stored compressed")
    found.check_read(harmless.SPARSITY, {})


def _groups(found: Fields, layout: str) -> Iterator[Fields]:
    """Yield the weights of each of `config_groups`. layout: the format that a group may name; "" for any.

    :raises ConfigError: if a group is of another format, or has no weights.
    """
    groups = found.get("config_groups", {})
    if not isinstance(groups, Mapping):
        raise ConfigError(f"config_groups of quantization_config must be an object, not {groups!r}")
    for name, data in groups.items():
        where = f"quantization_config.config_groups.{name}"
        group = _fields(data if isinstance(data, Mapping) else {}, where)
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            raise ConfigError("a group of quantization_config has no weights")
        if layout:
            group.only("format", layout)
        group.check_read(harmless.GROUP, {})
        yield _fields(weights, f"{where}.weights")


def _compressed_group(weights: Fields, layout: str, ignore: tuple[str, ...]) -> WeightScheme:
    weights.only("dynamic", False)
    kind, strategy, size = weights.get("type"), weights.get("strategy"), weights.get("group_size")
    bits: Any = weights.get("num_bits")
    act_order = weights.get("actorder") in (True, "group", "dynamic")  # "weight", "static": the inputs stay in their order
    block = weights.get("block_structure")
    weights.check_read(harmless.WEIGHTS, {})
    if act_order and layout not in ("int-quantized", "pack-quantized"):
        raise ConfigError(f"compressed-tensors {layout} weights with an actorder are not supported")
    if layout == "float-quantized":
        if (kind, bits) != ("float", 8):
            raise ConfigError("compressed-tensors weights are supported as 8-bit floats only")
        return WeightScheme(name=_float_strategy(strategy, block), bits=8, ignore=ignore)
    if layout in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        name, wanted = ("nvfp4", 16) if layout.startswith("nvfp4") else ("mxfp4", 32)
        if (kind, bits) != ("float", 4) or size not in (None, wanted):
            raise ConfigError(f"{layout} weights are 4-bit floats in groups of {wanted}, not {kind} of {bits} bits")
        return WeightScheme(name=name, bits=4, group=wanted, ignore=ignore)
    if kind != "int" or bits not in ((8,) if layout == "int-quantized" else (4, 8)):
        raise ConfigError(f"compressed-tensors {layout} weights of type {kind!r} and {bits} bits are not supported")
    if strategy not in ("channel", "group", "tensor") or (layout == "int-quantized" and strategy == "group"):
        raise ConfigError(f"compressed-tensors strategy {strategy!r} is not supported for {layout}")
    group = _group_size(size) if strategy == "group" else 0
    name = "int8" if layout == "int-quantized" else "packed"
    return WeightScheme(name=name, bits=bits, group=group, act_order=act_order, ignore=ignore)


def _float_strategy(strategy: Any, block: Any) -> FormatName:
    match strategy:
        case "tensor" | "channel":
            return "fp8"
        case "block":
            _check_block(block)
            return "fp8_blocks"
        case other:
            raise ConfigError(f"compressed-tensors strategy {other!r} is not supported; tensor, channel and block are")


def _check_block(block: Any) -> None:
    if block not in ([FP8_BLOCK, FP8_BLOCK], f"{FP8_BLOCK}x{FP8_BLOCK}"):
        raise ConfigError(f"FP8 weights in blocks of {block} are not supported; blocks of {FP8_BLOCK}×{FP8_BLOCK} are")


def _group_size(size: Any) -> int:
    """-1 and None: one group for each output, which is 0 here."""
    if size in (None, -1):
        return 0
    if isinstance(size, int) and not isinstance(size, bool) and (size in _GROUPS or (size > 0 and size % 128 == 0)):
        return size
    raise ConfigError(f"weights in groups of {size!r} are not supported; groups of 16, 32, 64 and multiples of 128 are")


def _ignored(found: Fields) -> tuple[str, ...]:
    """What is not quantised, under any of its names.

    :raises ConfigError: if it is no list of names, or a pattern can't be read."""
    names: dict[str, None] = {}
    for key in ("ignore", "modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers", "exclude_modules"):
        listed = found.get(key, [])
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise ConfigError(f"{key} of quantization_config must be a list of names, not {listed!r}")
        _check_patterns(key, listed)
        names |= dict.fromkeys(listed)
    return tuple(names)


def _stand_in(part: re.Match[str]) -> str:
    """Return one character in place of an opaque part."""
    return "{" if part[0].startswith("{") else "9" if part[0] in (r"\d", "[0-9]") else "x"


def _check_patterns(key: str, names: Iterable[str]) -> None:
    """:raises ConfigError: if one is no regular expression, or one that might take forever (see `_MAX_QUANTIFIERS`)."""
    for name in names:
        if not name.startswith("re:"):
            continue
        pattern = _OPAQUE.sub(_stand_in, name[3:])
        quantifiers = sum(1.0 if kind and of != "9" else 0.5 for of, kind in _QUANTIFIER.findall(pattern))
        if len(name) > _MAX_PATTERN or quantifiers > _MAX_QUANTIFIERS or pattern.count("(") > _MAX_PATTERN_GROUPS:
            raise ConfigError(f"{name[:80]!r} in {key} is not supported: it is too long or has too many quantifiers or groups")
        if re.search(r"\)[*+{]", pattern):
            raise ConfigError(f"{name[:80]!r} in {key} is not supported: it repeats a group")
        try:
            re.compile(name[3:])
        except (re.error, OverflowError) as error:
            raise ConfigError(f"{name[:80]!r} in {key} is no regular expression: {error}") from error


_READERS: dict[str, Callable[[Fields], WeightScheme]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
"""By `quant_method`."""
