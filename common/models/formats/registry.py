"""The formats with scales for groups of inputs, by name."""

from __future__ import annotations

from collections.abc import Mapping

from common.models.formats.awq import Awq
from common.models.formats.detect import FP8_BLOCK
from common.models.formats.gptq import Gptq
from common.models.formats.groups import GroupFormat
from common.models.formats.int8 import Int8
from common.models.formats.mxfp4 import Mxfp4
from common.models.formats.nf4 import Nf4
from common.models.formats.nvfp4 import Nvfp4
from common.models.formats.packed import Packed
from common.models.formats.scheme import ShardUnits, WeightScheme

_FORMATS: dict[str, GroupFormat] = {
    "awq": Awq(),
    "gptq": Gptq(),
    "int8": Int8(),
    "mxfp4": Mxfp4(),
    "nf4": Nf4(),
    "packed": Packed(),
}


def format_of(scheme: WeightScheme, shapes: Mapping[str, tuple[int, ...]]) -> GroupFormat | None:
    """The format of a checkpoint with tensors of `shapes`; None where its weights are floats (or GGUF's, which its reader
    knows)."""
    if scheme.name == "nvfp4":
        return Nvfp4(modelopt=any(name.endswith(".weight_scale_2") for name in shapes))
    return _FORMATS.get(scheme.name)


def shard_units(scheme: WeightScheme) -> ShardUnits:
    """Return how a quantised weight of a checkpoint can be cut for tensor parallelism."""
    if scheme.name == "fp8_blocks":
        return ShardUnits(FP8_BLOCK, FP8_BLOCK)
    if scheme.name == "gguf":  # cut in groups, after its blocks were read
        return ShardUnits(1, scheme.group)
    found = format_of(scheme, {})
    return ShardUnits() if found is None else found.units(scheme)
