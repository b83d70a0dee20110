"""Random weights of the right shapes, for benchmarks: made on the device, nothing is read.

A tensor's values depend on its name, shape, dtype and device kind alone, so that workers on equal devices agree.
"""

from __future__ import annotations

import math
import zlib

import torch

from common.models.config import ModelConfig
from common.models.weights.upload import Upload

STD = 0.02


class DummyWeights:
    """A `WeightSource` without files. Norms are 1, biases 0, everything else is normal with standard deviation 0.02."""

    holds_fp8 = False

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = decoder_shapes(config)

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
