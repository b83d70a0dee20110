"""What a model takes of a card, and what the card can make of it at best. Pure.

    tokens per second of N sequences <= N * bandwidth / (weights that a step reads + N * context * KV bytes per token)

The limit of decoding alone: https://arxiv.org/abs/2211.05102, section 2. Of experts a step reads those that its tokens touch.
Prompts, and whatever is no reading, come on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from common.cache.retention import Retention
from common.cache.spec import CacheLayout
from common.engine.load.precision import Precision
from common.engine.load.step_weights import Experts, step_weights
from common.engine.load.stored_weights import ITEM_BYTES
from common.models.config import ModelConfig
from common.models.weights.expected import decoder_shapes

ACHIEVED = 0.88
"""Share of a datasheet's bandwidth that a plain copy reaches: 4.24 of 4.8 TB/s on an H200 (docs/performance/gpu.md)."""
CONTEXT = 1024
"""Tokens that each sequence is assumed to have."""
USABLE = 0.9
"""Share of a card's memory for weights and KV: the default of gpu_memory_utilization."""

_GIB = 1 << 30


class Card(msgspec.Struct, frozen=True):
    """A GPU's memory in bytes, and its bandwidth in bytes per second, both as its datasheet says."""

    name: str
    memory_bytes: float
    bytes_per_s: float


CARDS = (Card("H100", 80e9, 3.35e12), Card("H200", 141e9, 4.8e12), Card("B200", 180e9, 8.0e12))


class GroupFootprint(msgspec.Struct, frozen=True):
    """KV of one cache group: its layers, and bytes per token over all of them. `retention`: which tokens' KV is kept."""

    name: str
    layers: int
    token_bytes: int
    retention: Retention

    def bytes_of(self, num_tokens: int) -> int:
        """Return the most bytes that a sequence of so many tokens keeps in this group."""
        span = self.retention.span
        return self.token_bytes * (min(num_tokens, span) if span else num_tokens)

    def __str__(self) -> str:
        kept = f" for the last {self.retention.span:,}" if self.retention.window else ""
        kept = f" in chunks of {self.retention.chunk:,}" if self.retention.chunk else kept
        return f"{self.name}: {self.layers} layers, {self.token_bytes:,} bytes a token{kept}"


class Footprint(msgspec.Struct, frozen=True):
    """A model in one precision. `weight_bytes`: of all weights. `step_bytes`: of those that a large decode step reads, which
    looks up single rows of the input embedding. `experts`: of those, what smaller steps need not read."""

    weight_bytes: float
    step_bytes: float
    groups: Sequence[GroupFootprint]
    experts: Sequence[Experts] = ()

    def read_bytes(self, rows: int) -> float:
        """Return what a step of so many rows reads of the weights."""
        return self.step_bytes - sum(one.bytes * (1 - one.touched(rows)) for one in self.experts)

    def kv_bytes(self, num_tokens: int) -> int:
        """Return the bytes of KV of a sequence of so many tokens."""
        return sum(group.bytes_of(num_tokens) for group in self.groups)

    def fits(self, card: Card) -> bool:
        """Whether the weights leave room for one sequence of CONTEXT tokens."""
        return self.weight_bytes + self.kv_bytes(CONTEXT) <= USABLE * card.memory_bytes

    def rows_that_fit(self, card: Card) -> int:
        """Return how many sequences of CONTEXT tokens a card holds beside the weights."""
        return max(0, int((USABLE * card.memory_bytes - self.weight_bytes) // self.kv_bytes(CONTEXT)))

    def tokens_per_s(self, card: Card, rows: int) -> float:
        """Return the most tokens per second that decoding `rows` sequences of CONTEXT tokens can give on a card."""
        return rows * ACHIEVED * card.bytes_per_s / (self.read_bytes(rows) + rows * self.kv_bytes(CONTEXT))


def footprint(
    model: ModelConfig, precision: Precision, layout: CacheLayout, block_types: Mapping[str, str] | None = None
) -> Footprint:
    """Return what `model` takes in `precision`. layout: its KV groups, with KV in that precision. block_types: of a GGUF file,
    the type of each tensor by the tensor's name."""
    step = step_weights(model, precision, block_types)
    shapes = decoder_shapes(model)
    vectors = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 1 or name.endswith("bias"))
    read = step.always + sum(experts.bytes for experts in step.experts) + ITEM_BYTES[precision.compute] * vectors
    is_head = model.tie_embeddings and precision.weights != "int8"  # a step reads the whole embedding then
    looked_up = 0 if is_head else ITEM_BYTES[precision.compute] * model.vocab_size * model.hidden_size
    groups = [
        GroupFootprint(
            group.name,
            len({member.layer for member in group.members}),
            group.block_bytes // group.block_tokens,
            group.retention,
        )
        for group in layout.groups
    ]
    return Footprint(read + looked_up, read, groups, step.experts)


def describe_weights(model: ModelConfig, precision: Precision, found: Footprint) -> str:
    """Return what the weights are: their format, and the dtype of experts that do not stay in it."""
    kept = {"none": precision.compute, "groups": model.quantization.name}.get(precision.weights, precision.weights)
    plain = step_weights(model, msgspec.structs.replace(precision, weights="none")).experts
    dequantised = found.experts and found.experts == plain and precision.weights != "none"
    return f"{kept} weights, experts in {precision.compute}" if dequantised else f"{kept} weights"


def describe_kv(found: Footprint, max_context: int) -> str:
    """Return a line about the KV groups."""
    groups = "; ".join(map(str, found.groups))
    return f"{groups}; {found.kv_bytes(max_context) / _GIB:.2f} GiB for a context of {max_context:,} tokens"


def describe_cards(found: Footprint, rows: Sequence[int] = (1, 32, 256)) -> str:
    """Return a line for each card: whether the model fits, and the most tokens per second at some batch sizes."""
    lines = [f"weights {found.weight_bytes / _GIB:.2f} GiB; at most, in sequences of {CONTEXT:,} tokens, by bandwidth alone:"]
    for card in CARDS:
        if not found.fits(card):
            lines.append(f"{card.name}: does not fit into {USABLE:.0%} of its {card.memory_bytes / 1e9:.0f} GB")
            continue
        held = [count for count in rows if count <= found.rows_that_fit(card)]
        speeds = ", ".join(f"{found.tokens_per_s(card, count):,.0f} tok/s at {count}" for count in held)
        lines.append(f"{card.name}: {speeds}; holds {found.rows_that_fit(card):,} sequences")
    return "\n".join(lines)
