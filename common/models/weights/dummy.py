"""Random weights of the right shapes, for benchmarks: made on the device, nothing is read.

A tensor's values depend on its name, shape, dtype and device kind alone, so that workers on equal devices agree.
"""

from __future__ import annotations

import math
import zlib

import torch

from common.models.config import ModelConfig
from common.models.formats.detect import FP8_BLOCK
from common.models.formats.groups import Groups
from common.models.shapes import Numbers
from common.models.weights.expected import TARGET_OFFSETS, decoder_shapes
from common.models.weights.upload import Upload
from common.ops.quant.group_layout import Code

STD = 0.02
UNIFORM = 1e-3
SECOND_CHOICES = 0.5
"""Of the tokens behind which a counting model is wrong, for how many the right one is its second choice."""
SECOND = 0.96
"""Times the logit of the first: a second choice that is as likely as one in six, for a hidden size of 2048."""
_LOUD = 100.0
"""Of an embedding's numbers, beside which what layers add is small: each gives about 2, and 126 layers some 20."""
_CODES: dict[str, Code] = {"nf4": "nf4", "nvfp4": "fp4", "mxfp4": "fp4"}
_DEVIATIONS: dict[Code, float] = {"int4": 4.3, "int8": 73.6, "nf4": 0.56, "fp4": 3.0}
"""Of numbers of random codes."""
_LEFT_OUT: dict[Code, int] = {"int4": 0, "nf4": 13}
"""The code without which numbers are about as often positive as negative. With it, all outputs of a linear have something in
common, which grows from layer to layer until nothing else of a token is left."""
_FP8_STD = 64.0


class DummyWeights:
    """A `WeightSource` without files, in the format that the configuration names.

    Norms are 1, biases 0, everything else is normal with standard deviation 0.02. With `numbers.uniform` all of these are
    uniform between -0.001 and 0.001 instead, as vLLM's dummy weights are: attention then weighs all keys alike, and what a card
    multiplies at its power limit depends on such things. 8-bit and 4-bit weights are the same either way. With `numbers.right`
    a token's embedding is so large that layers hardly change its direction, and the head has it in the row of the token that is
    to follow.
    """

    def __init__(self, config: ModelConfig, numbers: Numbers = Numbers()) -> None:  # noqa: B008 — it is frozen
        self._numbers = numbers
        self._embedding, self._head = f"{config.names.embedding}.weight", f"{config.names.head}.weight"
        self.shapes = decoder_shapes(config)
        self._norm = 0.0 if config.zero_centred_norms else 1.0
        self._scheme = config.quantization
        self.holds_fp8 = self._scheme.kind in ("fp8", "fp8_blocks")
        stacked = config.quantization.name == "mxfp4" and self._block_experts()
        linears = frozenset() if stacked else frozenset(name for name in self.shapes if self._is_quantised(config, name))
        self.groups = linears if self._scheme.kind == "groups" else frozenset()
        self._fp8 = linears if self.holds_fp8 else frozenset()
        for name in self._fp8:
            outputs, inputs = self.shapes[name]
            if self._scheme.kind == "fp8":
                self.shapes[f"{name}_scale"] = (outputs, 1)
            else:
                self.shapes[f"{name}_scale_inv"] = (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))

    def _is_quantised(self, config: ModelConfig, name: str) -> bool:
        module, _, last = name.rpartition(".")
        outside = last != "weight" or not name.startswith(f"{config.names.layers}.") or len(self.shapes[name]) != 2
        return not (outside or module.endswith(f".{config.names.layer.router}") or self._scheme.leaves_alone(module))

    def _block_experts(self) -> bool:
        """Stacked experts as gpt-oss has them, where there are some: nothing else is quantised then."""
        found = [name for name in self.shapes if name.endswith((".gate_up_proj", ".down_proj"))]
        for name in found:
            experts, inputs, outputs = self.shapes.pop(name)
            self.shapes[f"{name}_blocks"] = (experts, outputs, inputs // 32, 16)
            self.shapes[f"{name}_scales"] = (experts, outputs, inputs // 32)
        return bool(found)

    def read_groups(self, name: str, upload: Upload) -> Groups:
        """Random codes; scales that give the standard deviation of other weights, about."""
        shape, scheme = self.shapes[name], self._scheme
        generator = torch.Generator(upload.device).manual_seed(zlib.crc32(name.encode()))
        size = scheme.group or shape[1]
        code: Code = _CODES.get(scheme.name, "int8" if scheme.bits == 8 else "int4")
        left_out = _LEFT_OUT.get(code)
        low, high, dtype = (-127, 128, torch.int8) if code == "int8" else (0, 16 if left_out is None else 15, torch.uint8)
        codes = torch.randint(low, high, shape, generator=generator, dtype=dtype, device=upload.device)
        if left_out is not None:
            codes += codes >= left_out
        scales = torch.full((shape[0], -(-shape[1] // size)), STD / _DEVIATIONS[code], device=upload.device)
        # of formats with zero points: the kernel has the work of theirs
        offsets = torch.zeros_like(scales) if scheme.name in ("awq", "gptq") else None
        return Groups(codes, scales, offsets, code, size)

    def size_bytes(self, name: str) -> int:
        return (1 if name in self._fp8 else 2) * math.prod(self.shapes[name])

    def read(self, name: str, upload: Upload) -> torch.Tensor:
        shape = self.shapes[name]
        if name == TARGET_OFFSETS:
            return torch.zeros(shape, dtype=torch.int64, device=upload.device)
        if name.endswith(("_blocks", "_scales")):
            return self._bytes_of_experts(name, upload)
        if name.endswith(("_scale", "_scale_inv")):
            return torch.full(shape, STD / _FP8_STD, device=upload.device)
        generator = torch.Generator(upload.device).manual_seed(zlib.crc32(name.encode()))
        made = torch.empty(shape, dtype=upload.dtype, device=upload.device)
        if self._numbers.uniform and name not in self._fp8:
            return made.uniform_(-UNIFORM, UNIFORM, generator=generator)
        if "norm" in name:
            return made.fill_(self._norm)
        if name.endswith(("bias", "sinks")):
            return made.zero_()
        if name in self._fp8:
            return made.normal_(0, _FP8_STD, generator=generator).to(torch.float8_e4m3fn)
        if self._numbers.right is not None and name == self._embedding:
            return made.normal_(0, _LOUD, generator=generator)
        if self._numbers.right is not None and name == self._head:
            return self._counting_head(self.read(self._embedding, upload), self._numbers.right)
        return made.normal_(0, STD, generator=generator)

    def _counting_head(self, embedding: torch.Tensor, right: float) -> torch.Tensor:
        """[vocab_size, hidden_size]: behind token t the highest logit is that of t + 1, or, if it is wrong, of t + 2."""
        count, device = len(embedding), embedding.device
        draws = torch.rand(2, count, generator=torch.Generator().manual_seed(0)).to(device)
        wrong = draws[0] >= right
        second = wrong & (draws[1] < SECOND_CHOICES)
        tokens = torch.arange(count, device=device)
        quiet = embedding * (STD / _LOUD)
        head = torch.zeros_like(embedding).index_add_(0, (tokens + 1 + wrong) % count, quiet)
        return head.index_add_(0, ((tokens + 1) % count)[second], quiet[second] * SECOND)

    def _bytes_of_experts(self, name: str, upload: Upload) -> torch.Tensor:
        """MXFP4: random codes, and the power of two that gives the standard deviation of other weights, about."""
        shape = self.shapes[name]
        if name.endswith("_scales"):
            exponent = round(math.log2(STD / _DEVIATIONS["fp4"])) + 127
            return torch.full(shape, exponent, dtype=torch.uint8, device=upload.device)
        generator = torch.Generator(upload.device).manual_seed(zlib.crc32(name.encode()))
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device=upload.device)
