"""Runs step plans on a GPU, one step ahead of it.

    submit: pack rows ─► copy to the device ─► change block tables ─► settle open rows, look up ─► graph (embed … logits, draw)
            ─► filters, penalties ─► copy tokens back, event
    result: wait for the event

The host never waits in `submit`: a row that is fed takes its token from `sampled`, where the step before left it, and one that
follows a verification finds its place by what was accepted there (`ops/sampling/open_rows.py`). There is one
exception: what a constrained row may be depends on the tokens of the step before. The host waits for those, and fills masks,
while the device computes this step's logits. All work is on one stream, so steps run in the order of submission and share every
buffer on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial

import numpy as np
import torch

from common.engine.board import HEAD_SLOTS, ProposalBoard
from common.engine.gpu.block_tables import MAX_CHANGE_BYTES, BlockTables, max_table_ids
from common.engine.gpu.board import TakenReport
from common.engine.gpu.continuing import Continuing, Following, Known
from common.engine.gpu.graphs import PADDING, ShapeTable, StepGraph, exact_shape
from common.engine.gpu.head import DeviceHead, NotedStep
from common.engine.gpu.layer_cost import layer_cost
from common.engine.gpu.lookup import LookupReport, warm_lookup
from common.engine.gpu.open_rows import OPEN_WARM_UP
from common.engine.gpu.pinned import to_device
from common.engine.gpu.progress import DeviceProgress, open_progress
from common.engine.gpu.reading import places_read, read_rows
from common.engine.gpu.sampling import DeviceSampler
from common.engine.gpu.settling import Settling
from common.engine.gpu.step import DeviceStep, lost_if_broken
from common.engine.gpu.step_attention import StepAttention
from common.engine.gpu.step_buffers import StepPacker, StepShape, blank, buffer_bytes, device_rows, layout, step_tokens
from common.engine.gpu.warm_up import WARM_UP, warm_up_rows
from common.engine.layer_group import LayerGroup, check_copies, check_groups, make_copies
from common.engine.masks import StepMasks, fill_masks
from common.engine.plan import StepPlan, StepResult, StepRow
from common.engine.sampling import penalised
from common.models.decoder import Decoder, Inputs
from common.models.head_model import HeadModel
from common.ops.attention.settings import DEFAULT_SETTINGS, AttentionSettings
from common.ops.attention.work_list import DeviceRow
from common.ops.drafting.head_inputs import TargetStep
from common.ops.launching import OwnThread
from common.ops.sampling.open_row_inputs import StepInputs
from common.ops.sampling.open_rows import pack_open_rows, settle_open_rows
from common.ops.tensors import Feed
from common.protocol.errors import ConfigError, InvalidParameter
from common.runtime import logs

log = logs.get("engine")

_DEPTH = 3
"""Sets of pinned buffers: of the step being packed, the one submitted before it, and the one whose result is being taken."""
_MOST_INPUTS = 256
"""Shapes of which the views of a step's inputs are kept: making them takes the host as long as launching a kernel."""


class DeviceRunner:
    """`plan.Runner` over a decoder whose weights are on a GPU.

    groups: a pool for each cache group, in the decoder's dtype or float8_e4m3fn; each layer is in one of them.
    `max_rows`: sequences a step samples at most; `token_budget`: tokens of prompts and proposals in a step at most, beside a
    token of each other row. With `graphs`, shapes that `ShapeTable` lists are compiled and captured here, which takes seconds.

    :raises ConfigError: if the pools' shapes or dtypes are not the model's.
    """

    run_ahead = 2

    def __init__(
        self,
        decoder: Decoder,
        groups: Sequence[LayerGroup],
        *,
        fingerprint: str,
        max_rows: int,
        token_budget: int,
        graphs: bool = True,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        attention: AttentionSettings = DEFAULT_SETTINGS,
    ) -> None:
        config = decoder.config
        check_groups(groups, config, (decoder.dtype, torch.float8_e4m3fn))
        self.decoder = decoder
        self.groups = groups
        pool = groups[0].pool
        self.num_blocks, self.block_tokens = pool.shape[0], pool.shape[3]
        self.max_context = config.max_context
        self.vocab_size = config.vocab_size
        self.fingerprint = fingerprint
        self._device = pool.device
        self._on_gpu = pool.is_cuda
        self._stream = torch.cuda.Stream(self._device) if self._on_gpu else None
        self._thread = OwnThread(self._device, self._stream)
        self._limits, self._has_graphs = (max_rows, token_budget), graphs and pool.is_cuda
        self._max_tokens = max_tokens = step_tokens(max_rows, token_budget)
        longest = min(config.max_context, *(group.longest for group in groups))
        longest_blocks = -(-longest // self.block_tokens)
        num_blocks = [len(group.pool) for group in groups]
        self._tables = BlockTables(
            num_blocks=num_blocks,
            max_ids=max_table_ids(num_blocks, max_rows, longest_blocks, batch_invariant=attention.batch_invariant),
            max_tables=max_tokens * len(groups),
            device=self._device,
        )
        size = buffer_bytes(max_tokens, max_tokens, MAX_CHANGE_BYTES, len(groups))
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._staging = [torch.zeros(size, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(_DEPTH)]
        self._host = [staging.numpy() for staging in self._staging]
        self._tokens = [torch.zeros(max_tokens, dtype=torch.int64, pin_memory=self._on_gpu) for _ in range(_DEPTH)]
        self._events = [torch.cuda.Event(blocking=True) for _ in range(_DEPTH)] if self._on_gpu else []
        self._turn = 0
        self._packer = StepPacker(self._tables, block_tokens=self.block_tokens, vocab_size=config.vocab_size)
        self._sampler = DeviceSampler(max_tokens, self._device, _DEPTH, max_penalised=max_rows)
        self._attention = StepAttention(decoder, groups, self._tables, longest=longest, settings=attention)
        self._shapes = ShapeTable(max_rows, max_tokens, cost=layer_cost(decoder))
        self._graphs: dict[StepShape, StepGraph] = {}
        self._step_inputs = lru_cache(_MOST_INPUTS)(self._new_step_inputs)
        self._launched_sizes: set[tuple[int, int, bool]] = set()
        self._states = self._no_states = torch.empty(0)
        self._last: DeviceStep | None = None
        self._progress: DeviceProgress | None = None
        self._head: DeviceHead | None = None
        self._noted: Sequence[torch.Tensor] = ()
        self._settling = Settling(depth=_DEPTH, device=self._device)
        self._continuing = Continuing(
            self._tables,
            block_tokens=self.block_tokens,
            vocab_size=config.vocab_size,
            depth=_DEPTH,
            inputs_of=self._step_inputs,
            shape_of=self._shapes.choose,
        )
        if self._on_gpu:
            torch.cuda.synchronize(self._device)  # what was made above was made on another stream
            if self._has_graphs:
                self._capture(on_progress)
            self.warm_up(max_rows, token_budget)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def execute(self, plan: StepPlan) -> StepResult:
        """:raises InvalidParameter: if a row can't be run; nothing has been written then."""
        return self.submit(plan).result()

    def submit(self, plan: StepPlan) -> DeviceStep:
        """:raises InvalidParameter: if a row can't be run; nothing has been launched then."""
        begun = time.perf_counter()
        rows = plan.rows
        if not rows:
            return DeviceStep([], begun)
        for row in rows:
            if row.num_samples and penalised(row.sampling) and len(row.history) < row.start + len(row.tokens):
                raise InvalidParameter(f"penalties need a row's history, not {len(row.history)} tokens of it")
        check_copies(self.groups, plan.copies)
        following = self._continuing.follow(rows)
        if following is not None:
            return self._continue(plan, following, begun)
        is_read = any(row.num_read for row in rows)
        shape = None if is_read else self._shapes.choose(rows)
        graph = self._graphs.get(shape) if shape is not None else None
        if shape is None or graph is None:
            shape = exact_shape(rows)
        turn = (self._turn + 1) % _DEPTH
        if shape.tokens > self._max_tokens:
            raise InvalidParameter(f"a step of {shape.tokens} tokens is more than this engine's token budget")
        packed = self._packer.pack(rows, self._host[turn], shape)
        self._turn = turn
        with self._running(), lost_if_broken():
            used = slice(0, packed.changes.stop)
            self._buffer[used].copy_(self._staging[turn][used], non_blocking=True)
            self._tables.apply(self._buffer[packed.changes])
            make_copies(self.groups, plan.copies)
            special = self._sampler.load(rows)
            reports = self._settling.launch(rows, packed, partial(self._step_inputs, shape))
            read = places_read(rows, packed, self._device) if is_read else None
            drafts = None if self._head is None else self._head.plan(rows, packed)
            if graph is None:
                logits = self._forward(shape, device_rows(packed), read, notes=drafts is not None)
            else:
                logits = graph.replay()
            step = self._behind(plan, begun, logits, special=special, is_read=is_read, reports=reports)
            if self._head is not None and drafts is not None:
                self._head.draft(drafts, self._noted_step(shape, graph))
                self._noted = ()
        self._continuing.packed(Known(rows, shape, packed.first_blocks))
        return step

    def _continue(self, plan: StepPlan, following: Following, begun: float) -> DeviceStep:
        """Submit a step that continues the one before it; see `continuing.py`."""
        known = following.step
        graph = self._graphs.get(known.shape)
        self._turn = (self._turn + 1) % _DEPTH
        with self._running(), lost_if_broken():
            make_copies(self.groups, plan.copies)
            special = self._sampler.load_again(plan.rows)
            self._settling.passed()
            if self._head is not None:
                self._head.passed()
            self._continuing.advance(following, is_captured=graph is not None)
            logits = self._forward(known.shape, known.device_rows) if graph is None else graph.replay()
            step = self._behind(plan, begun, logits, special=special)
        self._continuing.continued(known)
        return step

    def _behind(
        self,
        plan: StepPlan,
        begun: float,
        logits: torch.Tensor,
        *,
        special: bool,
        is_read: bool = False,
        reports: Sequence[LookupReport | TakenReport] = (),
    ) -> DeviceStep:
        """Launch what comes behind a step's forward pass."""
        rows = plan.rows
        if self._progress is not None and plan.step:  # a probe has none
            self._progress.write(plan.step)
        readings = read_rows(self.decoder, rows, self._states) if is_read else ()
        self._states = self._no_states
        logprobs = self._sampler.finish(logits, rows, partial(self._masks, rows)) if special else None
        num_samples = sum(row.num_samples for row in rows)
        tokens = self._tokens[self._turn][:num_samples]
        tokens.copy_(self._sampler.results[:num_samples], non_blocking=True)
        event = self._events[self._turn] if self._on_gpu else None
        if event is not None:
            event.record()
        times = None if self._head is None else self._head.take_times()
        self._last = DeviceStep(rows, begun, tokens, logprobs, event, readings, reports, times)
        return self._last

    def tell_progress(self, word: np.ndarray) -> Callable[[], None] | None:
        """From here on the GPU writes the number of each step whose KV is there into `word`, uint64 [1], until what is returned
        is called. None: it can't."""
        self._progress = open_progress(word, self._device)
        return None if self._progress is None else self._progress.close

    def look_up(self, max_texts: int) -> None:
        """From here on look up what may follow rows with a `text`, of at most `max_texts` sequences in a step.

        :raises ConfigError: if the GPU has no memory left for their texts.
        """
        assert max_texts <= self._max_tokens
        with self._running():
            inputs = partial(self._step_inputs, StepShape(PADDING, 1, 1, 1))
            self._settling.lookup = warm_lookup(max_texts, self.max_context, _DEPTH, self._device, inputs)
            self._step_inputs.cache_clear()  # what the device chooses is elsewhere from here on

    def attach_head(self, model: HeadModel | None) -> None:
        """From here on draft with a head behind rows that have `drafts` and a slot of `HeadSlots`; None: without one. Captures
        all graphs anew.

        :raises torch.OutOfMemoryError, ConfigError: if the GPU has no memory left for it: attach none then.
        """
        board = self._settling.board.drafted
        with self._running():
            self._head = None if model is None else DeviceHead(model, self._max_tokens, self.max_context, board, depth=_DEPTH)
        if self._has_graphs:
            self._graphs.clear()
            self._capture(lambda done, total: None)
        if self._on_gpu:
            self.warm_up(*self._limits)

    def _noted_step(self, shape: StepShape, graph: StepGraph | None) -> NotedStep:
        """Where a step has what the head reads."""
        fields = layout(self._buffer, shape, len(self.groups))
        target = TargetStep(fields.tokens, fields.positions, self._sampler.sampled, self._sampler.draws)
        return NotedStep(shape, self._noted if graph is None else graph.noted, target, fields.query_starts)

    @property
    def board(self) -> ProposalBoard:
        """Where what rows with `is_posted` verify is posted."""
        return self._settling.board.posted

    def _new_step_inputs(self, shape: StepShape) -> StepInputs:
        fields = layout(self._buffer, shape, len(self.groups))
        return self._settling.inputs(fields, self._sampler, self._tables.ids, self.block_tokens)

    def _masks(self, rows: Sequence[StepRow]) -> StepMasks | None:
        """Waits for the step before, if a constrained row is fed by it."""
        fed = [row for row in rows if row.is_constrained and row.feed >= 0]
        if fed:
            assert self._last is not None
            sampled = self._last.sampled()
            for row in fed:
                row.output[-1] = max(0, sampled[row.feed])  # a row without a token is dropped when its step is committed
        return fill_masks(rows, self.vocab_size, self._sampler.mask_buffer)

    def may_compile(self, plan: StepPlan) -> bool:
        """Steps with a graph were compiled when it was captured; others compile what is new of their size."""
        is_read = any(row.num_read for row in plan.rows)
        if not is_read and self._shapes.choose(plan.rows) in self._graphs:
            return False
        size = plan.num_tokens.bit_length(), len(plan.rows).bit_length(), is_read
        known = size in self._launched_sizes
        self._launched_sizes.add(size)
        return not known

    def _forward(
        self,
        shape: StepShape,
        rows: Sequence[Sequence[DeviceRow]] = (),
        read: torch.Tensor | None = None,
        *,
        notes: bool = False,
    ) -> torch.Tensor:
        """Launches a step over the device buffer as it is laid out for `shape`. `rows`: of each cache group, for steps that are
        not captured. `read`: whose hidden states are to be left in `_states`. `notes`: the head's are left in `_noted`."""
        fields = layout(self._buffer, shape, len(self.groups))
        attention = self._attention.plan(fields, shape, rows)
        samples = None if shape.samples == shape.tokens else fields.samples
        feed = Feed(fields.feeds, self._sampler.sampled)
        if read is not None:  # then not every token is sampled: those that are read are not
            samples = torch.cat((fields.samples, read))
        noted = dict.fromkeys(self._head.layers, self._no_states) if notes and self._head is not None else None
        states = self.decoder.states(Inputs(fields.tokens, samples, attention, feed, noted))
        self._noted = () if noted is None else list(noted.values())
        if read is not None:
            states, self._states = states[: shape.samples], states[shape.samples :]
        logits = self.decoder.logits(states)
        if len(logits):
            self._sampler.draw(logits)
        return logits

    def own_thread(self) -> None:
        """The calling thread submits all steps from here on, and launches nothing else."""
        self._thread.take()

    def _running(self) -> AbstractContextManager[None]:
        return self._thread.launching()

    def warm_up(self, max_rows: int, token_budget: int) -> None:
        """Runs the largest steps that have no graph, on padding: what they need is compiled, and fits into memory. Then what
        shorter ones need besides: cuDNN plans a length that is new to a thread for a tenth of a second.

        :raises ConfigError: if it does not.
        """
        prompt_tokens = -(-token_budget // PADDING) * PADDING
        num_tokens = prompt_tokens + -(-max_rows // PADDING) * PADDING
        shape = StepShape(tokens=num_tokens, rows=1, max_queries=prompt_tokens, samples=len(WARM_UP[0]))
        try:
            with self._running():
                settle_open_rows(to_device(pack_open_rows([OPEN_WARM_UP]), self._device), 1, self._step_inputs(shape))
                for index, samples in enumerate(WARM_UP):
                    start = self.block_tokens * (index % 2)  # a prompt's first part, and one after a prefix
                    rows = warm_up_rows(samples)
                    blank(self._buffer, shape, len(self.groups))
                    self._continuing.warm_up(shape)
                    self._sampler.load(rows)
                    logits, _ = self._noted_forward(shape, [[DeviceRow(0, prompt_tokens, start, 0)]] * len(self.groups))
                    self._sampler.finish(logits, rows, partial(self._masks, rows))
                if self._stream is not None:
                    self._attention.plan_prompts(token_budget, self.max_context)
                    self._stream.synchronize()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of {num_tokens} tokens does not fit beside weights and KV: lower token_budget, gpu_memory_utilization "
                "or kv_cache_mb",
                param="token_budget",
            ) from error

    def _noted_forward(
        self, shape: StepShape, rows: Sequence[Sequence[DeviceRow]] = ()
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        logits = self._forward(shape, rows, notes=True)
        noted, self._noted = self._noted, ()
        return logits, noted

    # ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _capture(self, on_progress: Callable[[int, int], None]) -> None:
        """Largest first, so that the others fit into its memory. A captured step of unused rows touches nothing."""
        assert self._stream is not None
        shapes = sorted(self._shapes, key=lambda shape: -shape.tokens)
        with self._running():
            memory = torch.cuda.graph_pool_handle()
            for done, shape in enumerate(shapes):
                blank(self._buffer, shape, len(self.groups))
                forward = partial(self._noted_forward, shape)
                forward()
                self._graphs[shape] = StepGraph(forward, memory, self._stream)
                on_progress(done + 1, len(shapes))
            if self._head is not None:
                few = [shape for shape in shapes if shape in self._shapes.verify or shape.tokens <= HEAD_SLOTS]
                self._head.capture([self._noted_step(shape, self._graphs[shape]) for shape in few])
            self._stream.synchronize()
            torch.cuda.empty_cache()  # what the steps before the captures had is not for graphs
