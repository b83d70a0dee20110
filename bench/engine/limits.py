"""What the card allows at most: the time of a step from its bytes and its FLOPs, at ceilings measured on the same card.

    decode    Σ over steps of max((W + Σ keys · kv_bytes) / bandwidth, FLOPs / peak)
    prefill   max(W / bandwidth, 2 · P · n / peak of the linears + 4 · layers · heads · head_dim · pairs / peak of attention)

W is what a step reads of the weights: the layers' linears and the output head, and of experts those that its tokens touch
(`step_weights`); the input embedding is left out (a step reads a few of its rows). Keys are those that a layer sees.
Activations, sampling and launches are counted as nothing. See `common/engine/simulated/roofline.py`. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from common.cache.retention import Retention
from common.engine.load.precision import Precision
from common.engine.load.step_weights import step_weights
from common.models.config import ModelConfig


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


class _Keys(msgspec.Struct, frozen=True):
    """Layers that attend to the same keys. token_bytes: of KV, over all of them. pair_flops: of a query and a key."""

    retention: Retention
    token_bytes: int
    pair_flops: int

    def read(self, length: int) -> int:
        """Return the keys that the last of `length` tokens sees."""
        return length - self.retention.first_token(length - 1) if length else 0

    def pairs(self, length: int) -> int:
        """Return the pairs of query and key in a prompt of `length` tokens."""
        window, chunk = self.retention.window, self.retention.chunk
        if chunk:
            return length // chunk * _triangle(chunk) + _triangle(length % chunk)
        inside = min(length, window) if window else length
        return _triangle(inside) + (length - inside) * window


class Limits:
    """The limits of one model in one precision on a card with these ceilings."""

    def __init__(self, model: ModelConfig, precision: Precision, ceilings: Ceilings) -> None:
        self.ceilings = ceilings
        self.weights = step_weights(model, precision)
        mixers = [layer.mixer for layer in model.layers]
        kept = {mixer: Retention(window=mixer.window, chunk=mixer.chunk) for mixer in mixers}
        self._keys = [
            _Keys(
                retention,
                sum(2 * mixer.kv_size * precision.kv_bytes for mixer in mixers if kept[mixer] == retention),
                sum(4 * mixer.query_size for mixer in mixers if kept[mixer] == retention),
            )
            for retention in dict.fromkeys(kept.values())
        ]
        compute_peak = ceilings.matmul.get("bfloat16" if precision.compute == "float16" else precision.compute, 0.0)
        self.attention_peak = compute_peak
        self.linear_peak = ceilings.matmul.get(precision.weights, compute_peak)
        self.head_peak = compute_peak

    @property
    def kv_bytes(self) -> int:
        """Of a token, in all layers."""
        return sum(keys.token_bytes for keys in self._keys)

    def decode(self, prompts: Sequence[int], num_outputs: int) -> Limit:
        """The `num_outputs` - 1 steps after the first tokens of `prompts` (lengths): all rows decode together."""
        rows, steps = len(prompts), max(0, num_outputs - 1)
        seconds = total_bytes = total_flops = memory_s = 0.0
        lengths = Counter(prompts)
        for step in range(1, steps + 1):
            read = [sum(count * keys.read(length + step) for length, count in lengths.items()) for keys in self._keys]
            size = self.weights.bytes_of(rows) + sum(n * keys.token_bytes for n, keys in zip(read, self._keys, strict=True))
            attention = float(sum(n * keys.pair_flops for n, keys in zip(read, self._keys, strict=True)))
            memory = _divide(size, self.ceilings.bandwidth)
            seconds += max(memory, self._compute_s(rows, rows, attention))
            memory_s += memory
            total_bytes += size
            total_flops += self._flops(rows, rows) + attention
        return Limit(seconds, total_bytes, total_flops, "memory" if memory_s >= seconds else "compute")

    def prefill(self, prompts: Sequence[int]) -> Limit:
        """All of `prompts` (lengths) up to their first tokens, as one step."""
        tokens, lengths = sum(prompts), Counter(prompts)
        pairs = [sum(count * keys.pairs(length) for length, count in lengths.items()) for keys in self._keys]
        attention = float(sum(n * keys.pair_flops for n, keys in zip(pairs, self._keys, strict=True)))
        size = self.weights.bytes_of(tokens) + self.kv_bytes * tokens
        memory_s = _divide(size, self.ceilings.bandwidth)
        compute_s = self._compute_s(tokens, len(prompts), attention)
        flops = self._flops(tokens, len(prompts)) + attention
        return Limit(max(memory_s, compute_s), size, flops, "memory" if memory_s > compute_s else "compute")

    def _flops(self, tokens: int, samples: int) -> float:
        return 2.0 * (self.weights.layer_params * tokens + self.weights.head_params * samples)

    def _compute_s(self, tokens: int, samples: int, attention_flops: float) -> float:
        return (
            _divide(2.0 * self.weights.layer_params * tokens, self.linear_peak)
            + _divide(2.0 * self.weights.head_params * samples, self.head_peak)
            + _divide(attention_flops, self.attention_peak)
        )


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def _divide(amount: float, rate: float) -> float:
    return amount / rate if rate else 0.0
