"""Random weights of the right shapes, for benchmarks: made on the device, nothing is read.

A tensor's values depend on its name, shape, dtype and device kind alone, so that workers on equal devices agree.
"""

from __future__ import annotations

import math
import zlib

import torch

from common.models.config import ModelConfig
from common.models.formats.groups import Groups
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
            return torch.ones(shape, dtype=upload.dtype, device=upload.device)
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=upload.dtype, device=upload.device)
        generator = torch.Generator(upload.device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, dtype=upload.dtype, device=upload.device).normal_(0, STD, generator=generator)


def decoder_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a decoder of `config` takes."""
    hidden, middle, head = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head, config.num_kv_heads * head
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.output_bias),
        "mlp.gate_proj": (middle, hidden, config.mlp_bias),
        "mlp.up_proj": (middle, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, middle, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for name, (outputs, inputs, bias) in linears.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = (outputs,)
        for name, size in norms.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
