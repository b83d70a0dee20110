"""A head that drafts from hidden states, in the stream of a GPU's steps: behind each step, before the next one begins.

    step's graph ─► draws ─► results on their way to the host ─► the head: a pass over the step's pairs, a token for each row
                                                                 ─► a pass for each further token
    next step: settle open rows ─► takes what the head has posted ─► graph …

Nothing is waited for. What is sampled is read where the step left it, so the host only says which rows are drafted for, and
how many tokens. Drafts go to the device's side of the proposal board (`board.py`), and rows take them as they take what draft
workers post. A step of decoding rows has a graph of the head's first pass; others launch it kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from common.engine.board import HEAD_SLOTS
from common.engine.gpu.graphs import decode_sizes
from common.engine.gpu.head_contexts import HeadContexts
from common.engine.gpu.pinned import to_device
from common.engine.gpu.step_buffers import PackedStep, StepShape
from common.engine.plan import DraftPass, StepRow
from common.models.attention import DeviceAttention
from common.models.head_model import HeadModel
from common.ops.attention.settings import DEFAULT_SETTINGS
from common.ops.attention.work import AttentionWorkspace, plan_device_attention
from common.ops.attention.work_list import DeviceBatch
from common.ops.drafting.head_inputs import (
    NO_CONTEXT,
    RING_TOKENS,
    ROW_HEADER,
    WINDOW,
    DraftRows,
    FirstPass,
    HeadRow,
    TargetStep,
)
from common.ops.drafting.head_rows import advance_drafts, pack_head_rows, prepare_rows
from common.ops.kv.forms import KvTarget
from common.ops.sampling.gumbel import GREEDY_BELOW
from common.ops.sampling.sample_device import sample_filtered, sample_plain
from common.protocol.messages import SamplingParams

_BLOCK_TOKENS = 16


class NotedStep(NamedTuple):
    """A step that has been launched. noted: the target's hidden states before each of the head's layers, [tokens, hidden_size]
    each. query_starts: int32 [rows + 1], see `DeviceBatch`."""

    shape: StepShape
    noted: Sequence[torch.Tensor]
    target: TargetStep
    query_starts: torch.Tensor


class PlannedDrafts(NamedTuple):
    """Of one step. rows: all of its rows. new: contexts that have another sequence now. drafts: tokens for each row. filtered:
    whether a row that is drafted for has top-k or top-p."""

    rows: list[HeadRow]
    new: list[int]
    drafts: int
    filtered: bool


class _Draw(NamedTuple):
    """Which rows a token is drawn for, and whether some of them have top-k or top-p."""

    size: int
    filtered: bool


class DraftTimes:
    """When the passes behind one step began and ended, on the device."""

    def __init__(self, num_rows: int, num_pairs: int, drafts: int, events: Sequence[torch.cuda.Event]) -> None:
        self._counts = num_pairs, num_rows, drafts
        self._events = events

    def passes(self) -> list[DraftPass]:
        """Call it once a later step has run."""
        if not self._events:
            return []
        num_pairs, num_rows, drafts = self._counts
        begun, middle, ended = self._events
        with torch.cuda.device(ended.device):  # as in `DeviceStep.sampled`
            first_s, later_s = begun.elapsed_time(middle) / 1000, middle.elapsed_time(ended) / 1000
        later = [DraftPass(num_rows, later_s / (drafts - 1))] * (drafts - 1) if drafts > 1 else []
        return [DraftPass(num_pairs, first_s), *later]


class DeviceHead:
    """`layers`: of the target, before which hidden states are noted. max_tokens: of a step. board: int32 [HEAD_SLOTS,
    BOARD_WORDS], where drafts go. depth: steps under way at once."""

    def __init__(
        self,
        model: HeadModel,
        max_tokens: int,
        max_context: int,
        board: torch.Tensor,
        *,
        depth: int,
    ) -> None:
        self.layers = model.spec.layers
        self._model = model
        self._board = board
        spec, device = model.spec, board.device
        self._device = device
        blocks_each = RING_TOKENS // _BLOCK_TOKENS
        shape = (HEAD_SLOTS * blocks_each, spec.num_layers, 2, _BLOCK_TOKENS, spec.num_kv_heads, spec.head_dim)
        self._pool = torch.zeros(shape, dtype=model.dtype, device=device)
        places = max_context + 2 * _BLOCK_TOKENS
        self._table_blocks = places // _BLOCK_TOKENS
        ring = torch.arange(self._table_blocks, dtype=torch.int32, device=device) % blocks_each
        first = torch.arange(HEAD_SLOTS, dtype=torch.int32, device=device) * blocks_each
        self._block_ids = (first[:, None] + ring).flatten().contiguous()
        self._ropes = {model.rope: model.rope_table(places)}
        wide = [torch.zeros(max_tokens, dtype=torch.int64, device=device) for _ in range(3)]
        narrow = [torch.zeros(max(max_tokens, HEAD_SLOTS), dtype=torch.int32, device=device) for _ in range(2)]
        self._first = FirstPass(*wide, *narrow)
        self._rows = DraftRows.create(HEAD_SLOTS, device)
        self._features = torch.zeros(HEAD_SLOTS, spec.hidden_size, dtype=model.dtype, device=device)
        self._normed = torch.zeros_like(self._features)
        self._drafted = torch.zeros(HEAD_SLOTS, dtype=torch.int64, device=device)
        self._results = torch.zeros_like(self._drafted)
        self._starts = torch.arange(HEAD_SLOTS + 1, dtype=torch.int32, device=device)
        self._every = self._starts[:HEAD_SLOTS].clone()
        on_gpu = device.type == "cuda"
        words = HEAD_SLOTS * ROW_HEADER
        self._words = torch.zeros(words, dtype=torch.int32, device=device)
        self._staging = [torch.zeros(words, dtype=torch.int32, pin_memory=on_gpu) for _ in range(depth)]
        self._events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(depth + 1)] if on_gpu else []
        self._turn = 0
        self._contexts = HeadContexts()
        self._workspace = AttentionWorkspace(device)
        self._times: DraftTimes | None = None
        self._sizes = decode_sizes(HEAD_SLOTS)
        self._first_graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._draw_graphs: dict[_Draw, torch.cuda.CUDAGraph] = {}
        self._later_graphs: dict[_Draw, torch.cuda.CUDAGraph] = {}

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def passed(self) -> None:
        """A step is launched of which nothing is noted; call it instead of `plan`."""
        self._contexts.passed()

    def plan(self, rows: Sequence[StepRow], packed: PackedStep) -> PlannedDrafts | None:
        """Say what to draft behind a step; None: nothing. Call it for each step that is launched, in order."""
        planned, new = self._contexts.plan(rows, packed)
        if not planned:
            return None
        drafted = [row for row, one in zip(rows, planned, strict=True) if one.context != NO_CONTEXT]
        return PlannedDrafts(
            planned, new, max(row.drafts for row in drafted), any(_is_filtered(row.sampling) for row in drafted)
        )

    def draft(self, planned: PlannedDrafts, step: NotedStep) -> None:
        """Launch what drafts behind a step, which `planned` was made for and which has been launched."""
        rows = planned.rows
        for context in planned.new:  # what a masked load brings in must be a number
            blocks = RING_TOKENS // _BLOCK_TOKENS
            self._pool[context * blocks : (context + 1) * blocks].zero_()
        self._turn += 1
        events = self._events[self._turn % len(self._events)] if self._events else []
        _record(events, 0)
        graph = self._first_graphs.get(step.shape)
        if graph is not None:
            self._load(rows)
            graph.replay()
        else:
            self._launch_first(rows, step)
        draw = _Draw(next(size for size in self._sizes if size >= len(rows)), planned.filtered)
        self._replay(self._draw_graphs, draw, self._draw)
        _record(events, 1)
        for _ in range(planned.drafts - 1):
            self._replay(self._later_graphs, draw, self._pass)
        _record(events, 2)
        pairs = sum(row.length for row in rows if row.context != NO_CONTEXT)
        self._times = DraftTimes(len(rows), pairs, planned.drafts, events)

    def take_times(self) -> DraftTimes | None:
        """Return when the latest passes ran; None if that was asked before, or there are none."""
        times, self._times = self._times, None
        return times

    # ── what it computes ─────────────────────────────────────────────────────────────────────────────────────────────

    def _load(self, rows: Sequence[HeadRow]) -> None:
        staging = self._staging[self._turn % len(self._staging)]
        pack_head_rows(rows, staging.numpy())
        self._words.copy_(staging, non_blocking=True)

    def _launch_first(self, rows: Sequence[HeadRow], step: NotedStep) -> None:
        """A first pass without a graph: of the rows that are drafted for, as much as a pair may see."""
        kept: list[HeadRow] = []
        spans: list[tuple[int, int]] = []
        end = 0
        for row in rows:
            length = min(row.length, WINDOW) if row.context != NO_CONTEXT else 0
            spans.append((row.first + row.length - length, length))
            kept.append(row._replace(first=end, length=length, num_samples=row.num_samples if length else 0))
            end += length
        self._load(kept)
        host = torch.cat([torch.arange(first, first + length) for first, length in spans])
        picked = to_device(host.numpy(), self._device)
        starts = torch.tensor([0, *(row.first + row.length for row in kept)], dtype=torch.int32)
        tokens, positions, sampled, draws = step.target
        target = TargetStep(tokens[picked], positions[picked], sampled, draws)
        longest = max(row.length for row in kept)
        states = torch.cat([noted[picked] for noted in step.noted], -1)
        self._compute_first(target, states, to_device(starts.numpy(), self._device), longest)

    def _compute_first(self, target: TargetStep, states: torch.Tensor, query_starts: torch.Tensor, max_queries: int) -> None:
        num_tokens, num_rows = len(target.tokens), len(query_starts) - 1
        nexts, places, slots, lens, starts = self._first
        first = FirstPass(nexts[:num_tokens], places[:num_tokens], slots[:num_tokens], lens[:num_rows], starts[:num_rows])
        if num_rows > HEAD_SLOTS:
            first.context_lens.zero_()
        prepare_rows(self._words, target, first, self._rows, self._board, self._table_blocks)
        batch = DeviceBatch(query_starts, first.context_lens, self._block_ids, first.block_starts, max_queries, num_tokens)
        attention = self._attend(batch, first.slots, first.places)
        border = self._model.forward(first.nexts, self._model.features(states), attention)
        normed = self._model.read(border)
        torch.index_select(self._model.following(border, normed), 0, self._rows.selected, out=self._features)
        torch.index_select(normed, 0, self._rows.selected, out=self._normed)

    def _pass(self, draw: _Draw) -> None:
        """A further token of each row."""
        rows, size, starts = self._rows, draw.size, self._starts[: draw.size + 1]
        batch = DeviceBatch(starts, rows.context_lens[:size], self._block_ids, rows.block_starts[:size], 1, size)
        attention = self._attend(batch, rows.slots[:size], rows.places[:size])
        features = self._features[:size]
        border = self._model.forward(rows.tokens[:size], features, attention)
        normed = self._normed[:size] = self._model.read(border)
        following = self._model.following(border, normed)
        if following is not features:
            features.copy_(following)
        self._draw(draw)

    def _draw(self, draw: _Draw) -> None:
        """A token of each row goes on the board."""
        advance_drafts(self._sample(draw), self._rows, self._board)

    def _sample(self, draw: _Draw) -> torch.Tensor:
        """Return a token of each row, int64 [size], -1 where a logit was not finite."""
        logits, draws = self._model.logits(self._normed[: draw.size]), self._rows.draws
        sample_plain(logits, draws, self._drafted, results=self._results)
        if draw.filtered:
            sample_filtered(logits, self._every[: draw.size], draws, self._drafted, results=self._results)
        return self._results[: draw.size]

    def _attend(self, batch: DeviceBatch, slots: torch.Tensor, places: torch.Tensor) -> DeviceAttention:
        model = self._model
        plan = plan_device_attention(
            batch,
            self._pool,
            model.spec.num_heads,
            self._workspace,
            settings=DEFAULT_SETTINGS,
            dtype=model.dtype,
            form=model.mixer.form,
        )
        return DeviceAttention(KvTarget(self._pool, slots), {model.mixer.form.kind: plan}, places, self._ropes, model.dtype)

    # ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _replay(self, graphs: dict[_Draw, torch.cuda.CUDAGraph], draw: _Draw, launch: Callable[[_Draw], None]) -> None:
        graph = graphs.get(draw)
        if graph is None:
            launch(draw)
        else:
            graph.replay()

    def capture(self, steps: Sequence[NotedStep]) -> None:
        """Capture the first passes of `steps`, which have graphs of their own, and all later ones. On the runner's stream.

        Memory is not shared with the graphs of steps: these leave their hidden states there.
        """
        memory = torch.cuda.graph_pool_handle()
        pack_head_rows([], self._staging[0].numpy())
        self._words.copy_(self._staging[0])
        for step in sorted(steps, key=lambda step: -step.shape.tokens):

            def first(step: NotedStep = step) -> None:
                self._compute_first(step.target, torch.cat(list(step.noted), -1), step.query_starts, step.shape.max_queries)

            self._first_graphs[step.shape] = _captured(first, memory)
        for size in reversed(self._sizes):
            for draw in (_Draw(size, False), _Draw(size, True)):
                self._draw_graphs[draw] = _captured(partial(self._draw, draw), memory)
                self._later_graphs[draw] = _captured(partial(self._pass, draw), memory)


def _record(events: Sequence[torch.cuda.Event], index: int) -> None:
    if events:  # a CPU has none
        events[index].record()


def _is_filtered(params: SamplingParams) -> bool:
    return params.temperature >= GREEDY_BELOW and (params.top_k > 0 or params.top_p < 1)


def _captured(launch: Callable[[], None], memory: Any) -> torch.cuda.CUDAGraph:
    launch()  # kernels are compiled
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=memory, capture_error_mode="thread_local")
    try:
        launch()
    finally:
        graph.capture_end()
    return graph
