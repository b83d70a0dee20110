"""Random weights of the right shapes, for benchmarks: made on the device, nothing is read.

A tensor's values depend on its name, shape, dtype and device kind alone, so that workers on equal devices agree.
"""

from __future__ import annotations

import math
import zlib

import torch

from common.models.config import ModelConfig
from common.models.weights.expected import decoder_shapes
from common.models.weights.upload import Upload

STD = 0.02


class DummyWeights:
    """A `WeightSource` without files. Norms are 1, biases 0, everything else is normal with standard deviation 0.02."""

    holds_fp8 = False

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = decoder_shapes(config)
        self._norm = 0.0 if config.zero_centred_norms else 1.0

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
