"""What the card allows at most: the time of a step from its bytes and its FLOPs, at ceilings measured on the same card.

    decode    Σ over steps of max((W + Σ len · kv_bytes) / bandwidth, FLOPs / peak)
    prefill   max(W / bandwidth, 2 · P · n / peak of the linears + 4 · layers · heads · head_dim · pairs / peak of attention)

W is what a step reads of the weights: the layers' linears and the output head; the input embedding is left out (a step reads
a few of its rows). Activations, sampling and launches are counted as nothing. See `common/engine/simulated/roofline.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common.engine.load.precision import Precision
from common.models.config import ModelConfig

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Measured: bytes per second (copy: read + written), and FLOPs per second by the numbers that are multiplied."""

    device: str
    copy: float
    read: float
    matmul: dict[str, float]

    @property
    def bandwidth(self) -> float:
        return max(self.copy, self.read)

    def __str__(self) -> str:
        products = ", ".join(f"{name} matmul {rate / 1e12:,.2f} TFLOP/s" for name, rate in self.matmul.items())
        return f"{self.device}: copy {self.copy / 1e12:.3f} TB/s, read {self.read / 1e12:.3f} TB/s, {products}"


class Limit(msgspec.Struct, frozen=True):
    """Seconds that a run takes at least, by memory and by arithmetic; `bytes` and `flops` in all."""

    seconds: float
    bytes: float
    flops: float
    by: str


class Limits:
    """The limits of one model in one precision on a card with these ceilings."""

    def __init__(self, model: ModelConfig, precision: Precision, ceilings: Ceilings) -> None:
        self.ceilings = ceilings
        heads, kv_heads, hidden = model.num_heads, model.num_kv_heads, model.hidden_size
        per_layer = (2 * heads + 2 * kv_heads) * model.head_dim * hidden + 3 * hidden * model.intermediate_size
        self.layer_params = model.num_layers * per_layer
        self.head_params = hidden * model.vocab_size
        compute_bytes = _ITEM_BYTES[precision.compute]
        weight_bytes = compute_bytes if precision.weights == "none" else _ITEM_BYTES[precision.weights]
        self.weight_bytes = self.layer_params * weight_bytes + self.head_params * compute_bytes
        self.kv_bytes = 2 * model.num_layers * kv_heads * model.head_dim * precision.kv_bytes
        self.pair_flops = 4 * model.num_layers * heads * model.head_dim
        compute_peak = ceilings.matmul.get("bfloat16" if precision.compute == "float16" else precision.compute, 0.0)
        self.attention_peak = compute_peak
        self.linear_peak = compute_peak if precision.weights == "none" else ceilings.matmul.get(precision.weights, compute_peak)
        self.head_peak = compute_peak

    def decode(self, prompts: Sequence[int], num_outputs: int) -> Limit:
        """The `num_outputs` - 1 steps after the first tokens of `prompts` (lengths): all rows decode together."""
        rows, steps = len(prompts), max(0, num_outputs - 1)
        seconds = total_bytes = total_flops = memory_s = 0.0
        context = sum(prompts)
        for step in range(1, steps + 1):
            keys = context + rows * step
            size = self.weight_bytes + self.kv_bytes * keys
            flops = 2.0 * (self.layer_params + self.head_params) * rows + self.pair_flops * keys
            memory = _divide(size, self.ceilings.bandwidth)
            seconds += max(memory, self._compute_s(rows, rows, keys))
            memory_s += memory
            total_bytes += size
            total_flops += flops
        return Limit(seconds, total_bytes, total_flops, "memory" if memory_s >= seconds else "compute")

    def prefill(self, prompts: Sequence[int]) -> Limit:
        """All of `prompts` (lengths) up to their first tokens, as one step."""
        tokens, pairs = sum(prompts), sum(n * (n + 1) // 2 for n in prompts)
        size = self.weight_bytes + self.kv_bytes * tokens
        memory_s, compute_s = _divide(size, self.ceilings.bandwidth), self._compute_s(tokens, len(prompts), pairs)
        flops = 2.0 * (self.layer_params * tokens + self.head_params * len(prompts)) + self.pair_flops * pairs
        return Limit(max(memory_s, compute_s), size, flops, "memory" if memory_s > compute_s else "compute")

    def _compute_s(self, tokens: int, samples: int, pairs: int) -> float:
        return (
            _divide(2.0 * self.layer_params * tokens, self.linear_peak)
            + _divide(2.0 * self.head_params * samples, self.head_peak)
            + _divide(float(self.pair_flops * pairs), self.attention_peak)
        )


def _divide(amount: float, rate: float) -> float:
    return amount / rate if rate else 0.0
