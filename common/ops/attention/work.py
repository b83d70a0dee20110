"""A step on the device, and the plan of its attention: who attends to which keys.

Nothing here depends on lengths on the host, so that a CUDA graph can be captured over a `DeviceBatch` whose tensors keep their
addresses: one small kernel makes the work list of the step, and the attention of every layer goes through it. Keys are shared
out evenly over the card: a row of more than its share becomes several items ("splits"), whose results are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from common.ops import backend
from common.ops.attention.configs import (
    SHORT_QUERIES,
    AttentionConfig,
    PrefillBackend,
    choose_config,
    has_parts,
    has_ragged,
    widened,
)
from common.ops.attention.cut import Cut
from common.ops.attention.form import AttentionForm, FormKind, Reach
from common.ops.attention.prompt import takes_prompts
from common.ops.attention.prompt_plan import PromptPlan, plan_prompts
from common.ops.attention.settings import DEFAULT_SETTINGS, AttentionSettings
from common.ops.attention.work_list import DeviceBatch, DeviceRow, WorkList

_NEVER = 1 << 30


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


@dataclass(slots=True, frozen=True)
class FreshRun:
    """`count` prompts of `length` tokens each, one after the other from token `first`, with nothing before them. A long
    prompt is alone (`AttentionSettings.long_prompt_min`)."""

    first: int
    count: int
    length: int


@dataclass(slots=True, frozen=True)
class RaggedRun:
    """Short prompts of different lengths, one after the other from token `first`, with nothing before them, in one call.

    starts: int32 [prompts + 1] on the device, the token where each begins, and where the last ends. tokens: of all; longest: of
    one.
    """

    first: int
    tokens: int
    longest: int
    starts: torch.Tensor


@dataclass(slots=True)
class DevicePlan:
    """`plan_device_attention` makes it; valid until the next plan from the same workspace. Rows in `prompts`, `fresh`, `ragged`
    and `chunks` are in no list."""

    batch: DeviceBatch
    num_heads: int
    kv_heads: int
    head_dim: int
    prefill_backend: PrefillBackend
    settings: AttentionSettings
    kind: FormKind
    lists: list[WorkList] = field(default_factory=list)
    prompts: PromptPlan | None = None
    fresh: list[FreshRun] = field(default_factory=list)
    ragged: list[RaggedRun] = field(default_factory=list)
    chunks: list[DeviceRow] = field(default_factory=list)

    @property
    def reach(self) -> Reach:
        return self.kind.reach

    @property
    def takes_kv(self) -> bool:
        """Must the step's K and V come as tensors, too?"""
        prompts = self.prompts is not None and self.prompts.num_tokens > 0
        return bool(prompts or self.fresh or self.ragged or self.chunks)

    @property
    def listed_nowhere(self) -> int:
        """Tokens of the rows that are in no list."""
        fresh = sum(run.count * run.length for run in self.fresh) + (self.prompts.num_tokens if self.prompts else 0)
        return fresh + sum(run.tokens for run in self.ragged) + sum(run.length for run in self.chunks)


def plan_device_attention(
    batch: DeviceBatch,
    pool: torch.Tensor,
    num_heads: int,
    workspace: AttentionWorkspace,
    *,
    settings: AttentionSettings = DEFAULT_SETTINGS,
    config: AttentionConfig | None = None,
    dtype: torch.dtype | None = None,
    form: AttentionForm | None = None,
) -> DevicePlan:
    """Launch the kernel (two for steps of short and long rows) that makes the work list.

    Attention reads the list and `block_ids` before it waits for the kernel before it. So the last launch made here has no
    programmatic dependence: it begins after the list is written, and whatever follows begins after that.

    config: instead of the table's, for measurements. dtype: of queries; None: the pool's. form: of the layers that use the
    plan; None for plain attention. Layers whose forms are of one kind share a plan.

    :raises ValueError: for tensors of other shapes or dtypes, or heads that don't divide.
    """
    kv_heads, head_dim = pool.shape[4:]
    _check(batch, num_heads, kv_heads, pool)
    kind = FormKind() if form is None else form.kind
    rows, backend_name = batch.rows, settings.prefill_backend
    if rows is None or batch.max_queries < settings.fresh_prefill_min or settings.batch_invariant:
        backend_name = "kernel"
    if backend_name == "hopper":
        if not takes_prompts(head_dim, dtype or pool.dtype, kind):
            backend_name = "kernel"
    elif kind != FormKind():  # which SDPA can't express
        backend_name = "kernel"
    plan = DevicePlan(batch, num_heads, kv_heads, head_dim, backend_name, settings, kind)
    fresh_prefill_min = part_min_queries = _NEVER
    part_min_prefix = _NEVER if settings.part_min_prefix is None else settings.part_min_prefix
    if rows is not None and backend_name == "hopper":
        if any(row.start > settings.max_prefix and row.length >= settings.chunk_min for row in rows):
            settings = replace(settings, chunk_min=_NEVER)
        fresh_prefill_min, part_min_queries, part_min_prefix = settings.fresh_prefill_min, settings.chunk_min, 1
        plan.prompts, rows = plan_prompts(rows, settings, kind.reach, pool.shape[3], pool.device)
    elif rows is not None and backend_name != "kernel":
        fresh_prefill_min = settings.fresh_prefill_min
        longest = settings.ragged_max if has_ragged(head_dim, dtype or pool.dtype) else 0
        even, plan.ragged = _ragged_runs(rows, batch.query_starts, fresh_prefill_min, longest)
        plan.fresh = _fresh_runs(even, settings)
        if backend_name == "cudnn" and has_parts(head_dim, dtype or pool.dtype):
            part_min_queries = settings.long_prompt_min
            plan.chunks = [row for row in rows if settings.suits_parts(row.length, row.start)]
        rows = [
            row
            for row in rows
            if (row.start > 0 or row.length < fresh_prefill_min)
            and not (plan.chunks and settings.suits_parts(row.length, row.start))
        ]
    group = num_heads // kv_heads
    for min_queries, max_queries in _ranges(batch, group, settings):
        if rows is not None and not any(min_queries <= row.length <= max_queries for row in rows):
            continue
        queries = min(max_queries, batch.max_queries)
        if config is None:
            rows_per_sm = batch.num_rows * kv_heads / backend.num_sms(pool.get_device())
            invariant = settings.batch_invariant
            chosen = choose_config(head_dim, group, pool.dtype, queries, rows_per_sm=rows_per_sm, invariant=invariant)
        else:
            chosen = widened(config, head_dim, group, pool.dtype, queries)
        cut = Cut(
            target_items=max(1, backend.num_sms(pool.get_device()) * chosen.programs // kv_heads),
            min_tiles_per_split=max(1, chosen.min_split_keys // chosen.tile),
            min_queries=min_queries,
            max_queries=max_queries,
            fresh_prefill_min=fresh_prefill_min,
            part_min_queries=part_min_queries,
            part_min_prefix=part_min_prefix,
            query_tile=chosen.block_m // group,
            tile=chosen.tile,
            segment=chosen.segment_keys // chosen.tile,
            is_even=settings.is_even,
            reach=kind.reach,
        )
        plan.lists.append(_make_list(plan, pool, workspace, chosen, cut))
    if plan.lists:
        workspace.take("fence", (1,), torch.int32).zero_()
    return plan


def _ranges(batch: DeviceBatch, group: int, settings: AttentionSettings) -> list[tuple[int, int]]:
    short = max(1, 16 // group)
    if batch.max_queries <= SHORT_QUERIES or settings.batch_invariant or batch.num_rows == 1:
        return [(1, batch.max_queries)]
    return [(1, short), (short + 1, batch.max_queries)]


def _make_list(
    plan: DevicePlan, pool: torch.Tensor, workspace: AttentionWorkspace, config: AttentionConfig, cut: Cut
) -> WorkList:
    from common.ops.attention.work_triton import list_work

    batch, index = plan.batch, len(plan.lists)
    block_tokens, kv_heads, head_dim = pool.shape[3:]
    group = plan.num_heads // kv_heads
    query_tiles = batch.num_rows + (0 if cut.max_queries <= cut.query_tile else batch.num_tokens // cut.query_tile)
    split_items = cut.target_items
    if cut.segment:
        max_blocks = len(batch.block_ids) if batch.max_blocks is None else batch.max_blocks
        split_items = -(-max_blocks * block_tokens // config.segment_keys)
        split_items += batch.num_rows if any(cut.reach) else 0  # a window begins inside a segment
    max_items = query_tiles + split_items
    slots = min(max_items, 2 * split_items)
    slot_rows = (1 if cut.max_queries == 1 else cut.query_tile) * group  # few sizes: each is a kernel to compile
    name = f"{index}-{plan.reach.window}-{plan.reach.chunk}-{plan.kind.has_sinks:d}{plan.kind.is_capped:d}"

    def take(what: str, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return workspace.take(f"{what}-{name}", shape, dtype)

    work = WorkList(
        config=config,
        max_queries=cut.max_queries,
        items=take("items", max_items, 8),
        merges=take("merges", min(query_tiles, split_items), 4),
        counts=take("counts", 2),
        partials=take("partials", slots, kv_heads, slot_rows, head_dim, dtype=torch.float32),
        sums=take("sums", slots, kv_heads, slot_rows, dtype=torch.float32),
        arrivals=take("arrivals", slots, kv_heads),
    )
    list_work(batch, work, cut)
    return work


def _ragged_runs(
    rows: Sequence[DeviceRow], query_starts: torch.Tensor, shortest: int, longest: int
) -> tuple[list[DeviceRow], list[RaggedRun]]:
    """Find the rows of at least `shortest` tokens with nothing before them. Returns those that are alone or beside others of
    their length, and runs of the rest: neighbours of up to `longest` tokens."""
    runs: list[list[int]] = []
    for index, row in enumerate(rows):
        if row.start > 0 or row.length < shortest:
            continue
        before = runs[-1][-1] if runs else -2
        if before == index - 1 and max(row.length, rows[before].length) <= longest:
            runs[-1].append(index)
        else:
            runs.append([index])
    even: list[DeviceRow] = []
    ragged: list[RaggedRun] = []
    for run in runs:
        lengths = [rows[index].length for index in run]
        if len(set(lengths)) == 1:
            even += [rows[index] for index in run]
        else:
            starts = query_starts[run[0] : run[-1] + 2]
            ragged.append(RaggedRun(rows[run[0]].first, sum(lengths), max(lengths), starts))
    return even, ragged


def _fresh_runs(rows: list[DeviceRow], settings: AttentionSettings) -> list[FreshRun]:
    runs: list[FreshRun] = []
    for row in sorted(rows, key=lambda row: row.first):
        last = runs[-1] if runs else None
        short = row.length < settings.long_prompt_min
        if short and last is not None and last.length == row.length and last.first + last.count * last.length == row.first:
            runs[-1] = FreshRun(last.first, last.count + 1, last.length)
        else:
            runs.append(FreshRun(row.first, 1, row.length))
    return runs


def _check(batch: DeviceBatch, num_heads: int, kv_heads: int, pool: torch.Tensor) -> None:
    if num_heads % kv_heads:
        raise ValueError(f"{num_heads} query heads can't share {kv_heads} KV heads")
    block_tokens = pool.shape[3]
    if block_tokens & (block_tokens - 1) or not pool.is_contiguous():
        raise ValueError(f"the pool must be contiguous, in blocks of a power of two, not {block_tokens} tokens")
    if batch.query_starts.shape != (batch.num_rows + 1,) or batch.block_starts.shape != (batch.num_rows,):
        raise ValueError(f"{batch.num_rows} rows have {batch.num_rows + 1} starts of queries, and {batch.num_rows} of blocks")
    for tensor in (batch.query_starts, batch.context_lens, batch.block_ids, batch.block_starts):
        if tensor.dtype != torch.int32 or tensor.device != pool.device or not tensor.is_contiguous():
            raise ValueError(f"a batch is contiguous int32 on {pool.device}, not {tensor.dtype} on {tensor.device}")
