"""Random weights of the right shapes, for benchmarks: made on the device, nothing is read.

A tensor's values depend on its name, shape, dtype and device kind alone, so that workers on equal devices agree.
"""

from __future__ import annotations

import math
import zlib

import torch

from common.models.config import ModelConfig
from common.models.formats.groups import Groups
from common.models.weights.expected import decoder_shapes
from common.models.weights.upload import Upload
from common.ops.quant.grouped import Code

STD = 0.02
_CODES: dict[str, Code] = {"nf4": "nf4", "nvfp4": "fp4", "mxfp4": "fp4"}
_DEVIATIONS: dict[Code, float] = {"int4": 4.6, "int8": 73.6, "nf4": 0.55, "fp4": 3.0}
"""Of numbers of random codes."""


class DummyWeights:
    """A `WeightSource` without files. Norms are 1, biases 0, everything else is normal with standard deviation 0.02."""

    holds_fp8 = False

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = decoder_shapes(config)
        self._norm = 0.0 if config.zero_centred_norms else 1.0
        self._scheme = config.quantization
        in_groups = self._scheme.kind == "groups"
        self.groups = frozenset(name for name in self.shapes if in_groups and name.endswith("_proj.weight"))

    def read_groups(self, name: str, upload: Upload) -> Groups:
        """Random codes; scales that give the standard deviation of other weights, about."""
        shape, scheme = self.shapes[name], self._scheme
        generator = torch.Generator(upload.device).manual_seed(zlib.crc32(name.encode()))
        size = scheme.group or shape[1]
        code: Code = _CODES.get(scheme.name, "int8" if scheme.bits == 8 else "int4")
        low, high, dtype = (-127, 128, torch.int8) if code == "int8" else (0, 16, torch.uint8)
        codes = torch.randint(low, high, shape, generator=generator, dtype=dtype, device=upload.device)
        scales = torch.full((shape[0], -(-shape[1] // size)), STD / _DEVIATIONS[code], device=upload.device)
        # of formats with zero points: the kernel has the work of theirs
        offsets = torch.zeros_like(scales) if scheme.name in ("awq", "gptq") else None
        return Groups(codes, scales, offsets, code, size)

    def size_bytes(self, name: str) -> int:
        return 2 * math.prod(self.shapes[name])

    def read(self, name: str, upload: Upload) -> torch.Tensor:
        shape = self.shapes[name]
        if "norm" in name:
            return torch.full(shape, self._norm, dtype=upload.dtype, device=upload.device)
        if name.endswith(("bias", "sinks")):
            return torch.zeros(shape, dtype=upload.dtype, device=upload.device)
        generator = torch.Generator(upload.device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, dtype=upload.dtype, device=upload.device).normal_(0, STD, generator=generator)
