"""The ops of a step, as calls on buffers of their own: what `kernels.py` times.

A model with random weights and only as many layers as it takes to be larger than the cache: a call per layer, so that
when a layer's turn comes again, nothing of it is left there. Attention has sets of blocks for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from bench.engine.limits import Ceilings
from bench.engine.timing import Call, rotations
from common.engine.load.precision import Precision
from common.models.attention import DeviceAttention
from common.models.config import ModelConfig
from common.models.decoder import Decoder, Inputs
from common.ops.attention.configs import AttentionConfig
from common.ops.attention.form import AttentionForm, FormKind
from common.ops.attention.paged_attention import (
    AttentionRow,
    AttentionWorkspace,
    DeviceBatch,
    DevicePlan,
    DeviceRow,
    plan_device_attention,
)
from common.ops.attention.paged_attention import paged_attention as attend
from common.ops.attention.settings import DEFAULT_SETTINGS
from common.ops.kv.forms import KvTarget
from common.ops.kv.qkv_rope import qkv_rope
from common.ops.linear.embed import embed
from common.ops.linear.gate_up import gate_up
from common.ops.linear.linear import linear, takes_quantised
from common.ops.linear.weight import LinearWeight
from common.ops.norm.add_rms_norm import add_rms_norm
from common.ops.sampling.sample_device import DrawBatch, sample_plain

MAX_SETS = 24
BLOCK_TOKENS = 16


class Load(msgspec.Struct, frozen=True):
    """A step: `rows` sequences that have `context` tokens before it and get `queries` more each."""

    rows: int
    context: int
    queries: int = 1

    @property
    def tokens(self) -> int:
        return self.rows * self.queries

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one layer and head."""
        return self.rows * (self.queries * self.context + self.queries * (self.queries + 1) // 2)

    def __str__(self) -> str:
        if self.queries == 1:
            return f"decode, {self.rows} x {self.context}"
        return f"prefill, {self.rows} x {self.queries}" + (f" after {self.context}" if self.context else "")


@dataclass(slots=True)
class Op:
    """One op of a step. `size`: bytes that must be read or written; `per_step`: calls in the whole model."""

    name: str
    calls: list[Call]
    per_step: int
    size: float
    flops: float
    peak: float


@dataclass(slots=True)
class Batch:
    """A set of blocks, the plan over it, and what goes with each token."""

    plan: DevicePlan
    positions: torch.Tensor
    slots: torch.Tensor


class Bench:
    """Everything that the ops of one model take, in one precision, on one device."""

    def __init__(self, model: ModelConfig, decoder: Decoder, precision: Precision, ceilings: Ceilings, max_keys: int) -> None:
        """model: as it is; decoder: with fewer layers. max_keys: that a pool must hold at once."""
        self.model = model
        self.decoder = decoder
        self.ceilings = ceilings
        self.device = decoder.device
        self.dtype = decoder.dtype
        self.kv_dtype = torch.float8_e4m3fn if precision.kv == "fp8" else decoder.dtype
        self.num_layers = len(decoder.layers)
        self.kv_token_bytes = 2 * model.num_kv_heads * model.head_dim * self.kv_dtype.itemsize
        cache = rotations(1, self.device) if self.device.type != "cuda" else 0
        self.pool_tokens = max_keys if cache else max(max_keys, self._cached_tokens())
        blocks = -(-self.pool_tokens // BLOCK_TOKENS) + 4096 // BLOCK_TOKENS
        shape = (blocks, self.num_layers, 2, BLOCK_TOKENS, model.num_kv_heads, model.head_dim)
        self.pool = torch.zeros(shape, dtype=torch.uint8 if self.kv_dtype.itemsize == 1 else self.dtype, device=self.device)
        if self.kv_dtype.itemsize == 1:
            self.pool.random_(0, 0x70)  # numbers from 0 to 128
            self.pool = self.pool.view(torch.float8_e4m3fn)
        else:
            self.pool.normal_()
        self.rope = decoder.rope.table(min(model.max_context, 131_072))
        self.block_order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def _cached_tokens(self) -> int:
        """Tokens of KV in all layers here that are three times the cache."""
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return 3 * cache // (self.kv_token_bytes * self.num_layers) + 1

    # -- a step's attention

    def batch(self, load: Load, which: int = 0, config: AttentionConfig | None = None) -> Batch:
        """The `which`-th set of blocks. Rows are told to the host for prefill alone, as the runner does."""
        keys = load.context + load.queries
        per_row = -(-keys // BLOCK_TOKENS)
        count = load.rows * per_row
        at = (which * count) % max(1, len(self.block_order) - count + 1)
        ids = self.block_order[at : at + count]
        rows = [
            AttentionRow(row * load.queries, load.queries, load.context, ids[row * per_row : (row + 1) * per_row])
            for row in range(load.rows)
        ]

        def ints(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        firsts = range(0, count, per_row)
        device_rows = [DeviceRow(row.first, row.length, row.start, first) for row, first in zip(rows, firsts, strict=True)]
        device_batch = DeviceBatch(
            query_starts=ints(range(0, load.tokens + 1, load.queries)),
            context_lens=ints([keys] * load.rows),
            block_ids=ints(ids),
            block_starts=ints(firsts),
            max_queries=load.queries,
            num_tokens=load.tokens,
            rows=device_rows if load.queries > 1 else None,
        )
        workspace = AttentionWorkspace(self.device)
        positions = [load.context + query for _ in range(load.rows) for query in range(load.queries)]
        slots = [
            row.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
            for row in rows
            for position in range(load.context, keys)
        ]
        settings = DEFAULT_SETTINGS if config is None else replace(DEFAULT_SETTINGS, prefill_backend="kernel")
        heads = self.model.num_heads
        plan = plan_device_attention(
            device_batch, self.pool, heads, workspace, settings=settings, config=config, dtype=self.dtype
        )
        return Batch(
            plan=plan,
            positions=torch.tensor(positions, dtype=torch.int64, device=self.device),
            slots=torch.tensor(slots, dtype=torch.int64, device=self.device),
        )

    def batches(self, load: Load) -> list[Batch]:
        """As many as it takes to have left the cache, or as the pool holds."""
        keys = load.rows * (load.context + load.queries)
        wanted = -(-self._cached_tokens() // keys) if self.device.type == "cuda" else 1
        return [self.batch(load, which) for which in range(max(1, min(MAX_SETS, wanted, self.pool_tokens // keys)))]

    def attention(self, batch: Batch) -> DeviceAttention:
        return DeviceAttention(
            self._target(batch),
            {FormKind(): batch.plan},
            batch.positions,
            {self.model.rope: self.rope},
            self.dtype,
        )

    # -- the ops

    def ops(self, load: Load) -> list[Op]:
        model, layers, total, item = self.model, self.decoder.layers, self.model.num_layers, self.dtype.itemsize
        rows, samples = load.tokens, load.rows
        eps = model.rms_eps
        batches = self.batches(load)
        targets = {id(batch): self._target(batch) for batch in batches}
        q_size = model.num_heads * model.head_dim
        hidden = self._random(rows, model.hidden_size)
        tokens = torch.randint(0, model.vocab_size, (rows,), device=self.device)
        quantised = takes_quantised(layers[0].gate_up, rows)
        normed = add_rms_norm(hidden, None, layers[0].input_norm, eps, quantise=takes_quantised(layers[0].qkv, rows))
        to_mlp = add_rms_norm(hidden, None, layers[0].mlp_norm, eps, quantise=quantised)
        projected = linear(normed, layers[0].qkv, split=True)
        attended = self._random(rows, q_size)
        delta = linear(attended, layers[0].output, split=True)
        middle = gate_up(to_mlp, layers[0].gate_up)
        logits = self._random(samples, model.vocab_size).float()
        draws = DrawBatch.create(samples, self.device)
        drawn = torch.zeros(samples, dtype=torch.int64, device=self.device)
        size = rows * model.hidden_size
        norm_bytes = size * (2 * item + item) + delta.numel() * delta.element_size()

        def op(name: str, calls: list[Call], per_step: int, size: float, flops: float = 0.0, peak: str = "") -> Op:
            return Op(name, calls, per_step, size, flops, self.ceilings.matmul.get(peak or str(self.dtype)[6:], 0.0))

        def product(name: str, weights: list[LinearWeight], call: Callable[[LinearWeight], object], out: int) -> Op:
            weight = weights[0]
            bytes_ = weight.data.nbytes + rows * (weight.in_features + out) * item
            peak = "fp8" if weight.format == "fp8" else ""
            flops = 2.0 * rows * weight.parameters
            return op(name, [lambda one=one: call(one) for one in weights], total, bytes_, flops, peak)

        def project(batch: Batch, layer: int) -> object:
            return qkv_rope(
                projected,
                layers[layer].mixer.heads,
                targets[id(batch)],
                layer,
                positions=batch.positions,
                rope=self.rope,
                dtype=self.dtype,
                need_kv=batch.plan.takes_kv,
            )

        head = self.decoder.head
        head_bytes = head.data.nbytes + samples * (model.hidden_size * item + model.vocab_size * logits.element_size())
        last = self._random(samples, model.hidden_size)
        listed = [op("work list", [self._replanning(one) for one in batches], 1, 0.0)] if batches[0].plan.lists else []
        return [
            op("embed", [lambda: embed(tokens, self.decoder.embedding)], 1, 2 * size * item),
            *listed,
            op(
                "add_rms_norm" + (" to fp8" if quantised else ""),
                [lambda one=one: add_rms_norm(hidden, delta, one.mlp_norm, eps, quantise=quantised) for one in layers],
                2 * total + 1,
                norm_bytes,
            ),
            product("qkv", [one.qkv for one in layers], lambda w: linear(normed, w, split=True), layers[0].qkv.out_features),
            op(
                "qkv_rope",
                [lambda b=b, i=i: project(b, i) for b in batches for i in range(self.num_layers)],
                total,
                projected.numel() * projected.element_size() + rows * (q_size * item + self.kv_token_bytes),
            ),
            self._attend(load, batches),
            product("output", [one.output for one in layers], lambda w: linear(attended, w, split=True), model.hidden_size),
            product("gate_up", [one.gate_up for one in layers], lambda w: gate_up(to_mlp, w), model.intermediate_size),
            product("down", [one.down for one in layers], lambda w: linear(middle, w, split=True), model.hidden_size),
            op(
                "head",
                [lambda: linear(last, head, wide=True)],
                1,
                head_bytes,
                2.0 * samples * model.hidden_size * model.vocab_size,
            ),
            op("sample, greedy", [lambda: sample_plain(logits, draws, drawn)], 1, logits.nbytes),
        ]

    def attend_calls(self, load: Load, batches: Sequence[Batch]) -> list[Call]:
        model = self.model
        query = self._random(load.tokens, model.num_heads, model.head_dim)
        key, value = (self._random(load.tokens, model.num_kv_heads, model.head_dim) for _ in range(2))
        scale = self.decoder.kv_form(self.kv_dtype)["kv_scale"]

        def call(batch: Batch, layer: int) -> object:
            extra = {"key": key, "value": value} if batch.plan.takes_kv else {}
            return attend(query, self.pool, layer, batch.plan, AttentionForm(model.head_dim**-0.5), kv_scale=scale, **extra)

        return [lambda b=b, i=i: call(b, i) for b in batches for i in range(self.num_layers)]

    def attend_bytes(self, load: Load) -> float:
        read = load.rows * (load.context + load.queries) * self.kv_token_bytes
        return read + 2 * load.tokens * self.model.num_heads * self.model.head_dim * self.dtype.itemsize

    def attend_flops(self, load: Load) -> float:
        return 4.0 * load.pairs * self.model.num_heads * self.model.head_dim

    def _attend(self, load: Load, batches: Sequence[Batch]) -> Op:
        kind = "SDPA" if batches[0].plan.takes_kv else "paged"
        peak = self.ceilings.matmul.get(str(self.dtype)[6:], 0.0)
        calls = self.attend_calls(load, batches)
        size, flops = self.attend_bytes(load), self.attend_flops(load)
        return Op(f"attention, {kind}", calls, self.model.num_layers, size, flops, peak)

    def _target(self, batch: Batch) -> KvTarget:
        return KvTarget(self.pool, batch.slots, **self.decoder.kv_form(self.kv_dtype))

    def _replanning(self, batch: Batch) -> Call:
        workspace = AttentionWorkspace(self.device)  # kept from step to step
        return lambda: plan_device_attention(batch.plan.batch, self.pool, self.model.num_heads, workspace, dtype=self.dtype)

    def step(self, load: Load, num_layers: int) -> Call:
        """A whole step of a model of `num_layers` layers, work list and sampling included."""
        decoder, batch = self.decoder, self.batch(load)
        tokens = torch.randint(0, self.model.vocab_size, (load.tokens,), device=self.device)
        ends = torch.arange(load.queries - 1, load.tokens, load.queries, device=self.device)
        samples = None if load.queries == 1 else ends
        draws = DrawBatch.create(load.rows, self.device)
        drawn = torch.zeros(load.rows, dtype=torch.int64, device=self.device)
        workspace = AttentionWorkspace(self.device)

        def call() -> None:
            every, decoder.layers = decoder.layers, decoder.layers[:num_layers]
            try:
                plan = plan_device_attention(batch.plan.batch, self.pool, self.model.num_heads, workspace)
                own = Batch(plan, batch.positions, batch.slots)
                sample_plain(decoder.forward(Inputs(tokens, samples, self.attention(own))), draws, drawn)
            finally:
                decoder.layers = every

        return call

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)


def layers_needed(model: ModelConfig, precision: Precision, device: torch.device) -> int:
    """So many layers that their smallest matrices are three times the cache together; a CPU: two."""
    if device.type != "cuda":
        return min(2, model.num_layers)
    item = 1 if precision.weights == "fp8" else 2
    smallest = min(model.num_heads * model.head_dim * model.hidden_size, 2 * model.hidden_size * model.intermediate_size) * item
    return max(2, min(model.num_layers, rotations(smallest, device)))
