"""A step on the device, and the plan of its attention: who attends to which keys.

Nothing here depends on lengths on the host, so that a CUDA graph can be captured over a `DeviceBatch` whose tensors keep their
addresses: one small kernel makes the work list of the step, and the attention of every layer goes through it. Keys are shared
out evenly over the card: a row of more than its share becomes several items ("splits"), whose results are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.ops import backend
from common.ops.attention import configs as attention_configs
from common.ops.attention.configs import AttentionConfig, PrefillBackend, choose_config, widened
from common.ops.attention.plan_cpu import AttentionRow

_MOST = 1 << 30


@dataclass(slots=True)
class DeviceBatch:
    """A step of up to `num_rows` sequences, in tensors of fixed size.

    query_starts: int32 [num_rows + 1]; row r's queries are tokens [query_starts[r], query_starts[r + 1]) of the step; unused
        rows are last and empty, and tokens past query_starts[num_rows] are padding.
    context_lens: int32 [num_rows], keys of each row after the step, its own tokens included.
    block_ids: int32 [capacity] and block_starts: int32 [num_rows + 1]; row r's blocks are
        block_ids[block_starts[r] : block_starts[r + 1]], and may be more than its keys need.
    max_queries: no row has more; num_tokens: of the step, padding included.
    rows: the same on the host, if it knows: prompts without a cached prefix are then found for SDPA.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_ids: torch.Tensor
    block_starts: torch.Tensor
    max_queries: int
    num_tokens: int
    rows: Sequence[AttentionRow] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)


class AttentionWorkspace:
    """Device memory for plans, used by one step at a time. Buffers that were outgrown are kept: a graph may point to them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zero at first; the same memory for the same name, until more is asked for."""
        needed = 1
        for size in shape:
            needed *= size
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < needed:
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = self._buffers[name] = torch.zeros(max(needed, 1), dtype=dtype, device=self._device)
        return buffer[:needed].view(shape)


@dataclass(slots=True)
class WorkList:
    """Rows of [least, most] queries.

    items: int32 [max_items, 8]: first token, queries, position of the first, where the row's block ids begin, first key tile,
        key tiles, first slot of the partial results (-1: there is one result, written to the output), which of the parts this
        is + how many there are · 65536. Without key tiles it is not a part.
    merges: int32 [max_merges, 4]: first token, queries, first slot, slots.
    counts: int32 [2], how many of both there are.
    partials: float32 [slots, kv_heads, slot_rows, head_dim]; sums: float32 [slots, kv_heads, slot_rows], log2-sum-exps.
    arrivals: int32 [slots, kv_heads], zero between kernels; parts of a row written, at its first slot (fused merges).
    """

    config: AttentionConfig
    least: int
    most: int
    items: torch.Tensor
    merges: torch.Tensor
    counts: torch.Tensor
    partials: torch.Tensor
    sums: torch.Tensor
    arrivals: torch.Tensor


@dataclass(slots=True, frozen=True)
class FreshRun:
    """`count` prompts of `length` tokens each, one after the other from token `first`, with nothing before them. A long
    prompt is alone (`attention_configs.LONG_PROMPT`)."""

    first: int
    count: int
    length: int


@dataclass(slots=True, frozen=True)
class ChunkRun:
    """`length` tokens of a prompt from the step's token `first`, after `start` keys; its blocks begin at
    `block_ids[first_block]`."""

    first: int
    length: int
    start: int
    first_block: int


@dataclass(slots=True)
class DevicePlan:
    """`plan_device_attention` makes it; valid until the next plan from the same workspace. Rows in `fresh` and `chunks` are in
    no list."""

    batch: DeviceBatch
    num_heads: int
    kv_heads: int
    head_dim: int
    prefill_backend: PrefillBackend
    lists: list[WorkList] = field(default_factory=list)
    fresh: list[FreshRun] = field(default_factory=list)
    chunks: list[ChunkRun] = field(default_factory=list)

    @property
    def takes_kv(self) -> bool:
        """Must the step's K and V come as tensors, too?"""
        return bool(self.fresh or self.chunks)


def plan_device_attention(
    batch: DeviceBatch,
    pool: torch.Tensor,
    num_heads: int,
    workspace: AttentionWorkspace,
    *,
    prefill_backend: PrefillBackend | None = None,
    config: AttentionConfig | None = None,
    dtype: torch.dtype | None = None,
) -> DevicePlan:
    """Launches the kernel (two for steps of short and long rows) that makes the work list.

    Between it and the first attention there must be a launch without programmatic dependence (the embedding is one): attention
    reads the list and `block_ids` before it waits for the kernel before it.

    prefill_backend: None for the measured choice; other than "kernel" it needs `batch.rows`, and K and V as tensors in every
    `paged_attention`. config: instead of the table's, for measurements. dtype: of queries; None: the pool's.

    :raises ValueError: for tensors of other shapes or dtypes, or heads that don't divide.
    """
    kv_heads, head_dim = pool.shape[4:]
    _check(batch, num_heads, kv_heads, pool)
    if prefill_backend is None:
        prefill_backend = attention_configs.PREFILL_BACKEND
    if batch.rows is None or batch.max_queries < attention_configs.FRESH_QUERIES or backend.BATCH_INVARIANT:
        prefill_backend = "kernel"
    plan = DevicePlan(batch, num_heads, kv_heads, head_dim, prefill_backend)
    fresh = chunk = _MOST
    rows = batch.rows
    if rows is not None and prefill_backend != "kernel":
        fresh = attention_configs.FRESH_QUERIES
        plan.fresh = _fresh_runs([row for row in rows if row.start == 0 and row.length >= fresh])
        if prefill_backend == "cudnn" and attention_configs.has_parts(head_dim, dtype or pool.dtype):
            chunk = attention_configs.LONG_PROMPT
            plan.chunks = _chunk_runs(rows)
        rows = [row for row in rows if (row.start > 0 or row.length < fresh) and not (plan.chunks and _is_chunk(row))]
    for least, most in _ranges(batch, num_heads // kv_heads):
        if rows is not None and not any(least <= row.length <= most for row in rows):
            continue
        group, queries = num_heads // kv_heads, min(most, batch.max_queries)
        if config is None:
            rows_per_sm = batch.num_rows * kv_heads / backend.num_sms(pool.get_device())
            invariant = backend.BATCH_INVARIANT
            chosen = choose_config(head_dim, group, pool.dtype, queries, rows_per_sm=rows_per_sm, invariant=invariant)
        else:
            chosen = widened(config, head_dim, group, pool.dtype, queries)
        plan.lists.append(_make_list(batch, pool, num_heads, workspace, chosen, least, most, fresh, chunk, len(plan.lists)))
    return plan


def _ranges(batch: DeviceBatch, group: int) -> list[tuple[int, int]]:
    short = max(1, 16 // group)
    if batch.max_queries <= attention_configs.SHORT_QUERIES or backend.BATCH_INVARIANT or batch.num_rows == 1:
        return [(1, batch.max_queries)]
    return [(1, short), (short + 1, batch.max_queries)]


def _make_list(
    batch: DeviceBatch,
    pool: torch.Tensor,
    num_heads: int,
    workspace: AttentionWorkspace,
    config: AttentionConfig,
    least: int,
    most: int,
    fresh: int,
    chunk: int,
    index: int,
) -> WorkList:
    """fresh, chunk: queries from which on rows without a prefix, and with a long one, are not for the list."""
    from common.ops.attention.work_triton import list_work

    block_tokens, kv_heads, head_dim = pool.shape[3:]
    query_tile = config.block_m // (num_heads // kv_heads)
    segment = config.segment_keys // config.tile
    query_tiles = batch.num_rows + (0 if most <= query_tile else batch.num_tokens // query_tile)
    if segment:
        wanted = -(-len(batch.block_ids) * block_tokens // config.segment_keys)
    else:
        wanted = max(1, backend.num_sms(pool.get_device()) * config.programs // kv_heads)
    max_items = query_tiles + wanted
    slots = min(max_items, 2 * wanted)
    slot_rows = (1 if most == 1 else query_tile) * (num_heads // kv_heads)  # few sizes: each is a kernel to compile

    def take(name: str, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return workspace.take(f"{name}-{index}", shape, dtype)

    work = WorkList(
        config=config,
        least=least,
        most=most,
        items=take("items", max_items, 8),
        merges=take("merges", min(query_tiles, wanted), 4),
        counts=take("counts", 2),
        partials=take("partials", slots, kv_heads, slot_rows, head_dim, dtype=torch.float32),
        sums=take("sums", slots, kv_heads, slot_rows, dtype=torch.float32),
        arrivals=take("arrivals", slots, kv_heads),
    )
    list_work(
        batch.query_starts,
        batch.context_lens,
        batch.block_starts,
        work.items,
        work.merges,
        work.counts,
        query_tile=query_tile,
        tile=config.tile,
        segment=segment,
        wanted=wanted,
        fewest=max(1, config.fewest_keys // config.tile),
        least=least,
        most=most,
        fresh=fresh,
        chunk=chunk,
        prefix=attention_configs.LONG_PREFIX,
    )
    return work


def _fresh_runs(rows: list[AttentionRow]) -> list[FreshRun]:
    runs: list[FreshRun] = []
    for row in sorted(rows, key=lambda row: row.first):
        last = runs[-1] if runs else None
        short = row.length < attention_configs.LONG_PROMPT
        if short and last is not None and last.length == row.length and last.first + last.count * last.length == row.first:
            runs[-1] = FreshRun(last.first, last.count + 1, last.length)
        else:
            runs.append(FreshRun(row.first, 1, row.length))
    return runs


def _is_chunk(row: AttentionRow) -> bool:
    return attention_configs.suits_parts(row.length, row.start)


def _chunk_runs(rows: Sequence[AttentionRow]) -> list[ChunkRun]:
    """rows: all of the step, in the order of their blocks."""
    runs: list[ChunkRun] = []
    first_block = 0
    for row in rows:
        if _is_chunk(row):
            runs.append(ChunkRun(row.first, row.length, row.start, first_block))
        first_block += len(row.blocks)
    return runs


def _check(batch: DeviceBatch, num_heads: int, kv_heads: int, pool: torch.Tensor) -> None:
    if num_heads % kv_heads:
        raise ValueError(f"{num_heads} query heads can't share {kv_heads} KV heads")
    block_tokens = pool.shape[3]
    if block_tokens & (block_tokens - 1) or not pool.is_contiguous():
        raise ValueError(f"the pool must be contiguous, in blocks of a power of two, not {block_tokens} tokens")
    if batch.query_starts.shape != (batch.num_rows + 1,) or batch.block_starts.shape != (batch.num_rows + 1,):
        raise ValueError(f"{batch.num_rows} rows have {batch.num_rows + 1} starts of queries and of blocks")
    for tensor in (batch.query_starts, batch.context_lens, batch.block_ids, batch.block_starts):
        if tensor.dtype != torch.int32 or tensor.device != pool.device or not tensor.is_contiguous():
            raise ValueError(f"a batch is contiguous int32 on {pool.device}, not {tensor.dtype} on {tensor.device}")
