"""A head that drafts from hidden states, beside an engine on a CPU: it runs in the engine's thread, behind its step.

    the step's states ─► noted for each sequence ─► a first pass: pairs that are new ─► a token for each row that wants some
                                                      ┌───────────────────────────────────────────┘
                                                      └► a pass for each further token: its feature is what the last pass left

All passes are one compiled call (`ops.cpu_int8.drafting_numba`). What it drafts is compared with what the target samples, so
nothing here has to be exact.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.cpu.head_arrays import MAX_DRAFTS, nothing_drafted, rows_of
from common.engine.cpu.head_context import KEPT_STATES, HeadContext, HeadContexts
from common.engine.outcomes import accept
from common.engine.plan import NO_TOKEN, Drafted, DraftPass, RowSamples, StepRow
from common.models.head_weights import HeadTensors, lm_head_rows
from common.models.rope import inverse_frequencies
from common.ops.cpu_int8.attention_numba import Step
from common.ops.cpu_int8.choice_numba import Scratch
from common.ops.cpu_int8.drafting_numba import (
    CLOCK,
    DraftResults,
    LaterPasses,
    counters_for_drafting,
    drafting,
    phases_of_a_pass,
)
from common.ops.cpu_int8.forward_numba import Room
from common.ops.cpu_int8.head_numba import HeadWeights
from common.ops.cpu_int8.team_cpu import together
from common.ops.cpu_int8.weights import LANES, PAIRS, Int8Weight, linears_of, pack_int8
from common.ops.drafting.head_layer_tensors import HeadLayerTensors

CONTEXT_TOKENS = 1024
"""Of a sequence that the head attends to, the last ones."""
FIRST_IDS = 4096
"""Number of draft-vocabulary ids, a multiple of `LANES`, whose logits every pass computes. The recipe's heads list the
likeliest tokens first. In others ids ascend, and BPE gives frequent tokens low ids."""
_STANDS_OUT = 0.3
"""Least probability among the first ids with which a token is proposed without computing the logits of the others."""
_BLOCK_TOKENS = 16


@dataclass(slots=True)
class _Job:
    """A row with pairs to compute: `states` of the target, and `nexts`, the tokens behind them. place: of the first pair in the
    cache; position: in the text."""

    row: StepRow
    context: HeadContext
    states: NDArray[np.float32]
    nexts: list[int]
    place: int
    position: int
    drafted: Drafted = field(default_factory=lambda: Drafted([], []))


class Head:
    """layers: before which layers of the target it wants hidden states. max_sequences: that it remembers."""

    def __init__(self, tensors: HeadTensors, *, max_sequences: int, threads: int, context_tokens: int = CONTEXT_TOKENS) -> None:
        spec = self.spec = tensors.spec
        self.layers = np.array(spec.layers, np.int64)
        self.threads = threads
        scaled = _evened(tensors)
        self._state_scale = scaled.states.numpy()
        self._num_first = min(FIRST_IDS, spec.draft_vocab_size)
        self._packed = [
            pack_int8(scaled.fc),
            *_in_two(_packed_lm_head(tensors), self._num_first),
            *(linear for layer in tensors.layers for linear in _packed_layer(layer)),
        ]
        no_norm = torch.zeros(spec.hidden_size)
        input_norms = [no_norm if layer.input_norm is None else layer.input_norm for layer in tensors.layers]
        self._weights = HeadWeights(
            linears=linears_of(self._packed),
            embedding_norm=scaled.embedding_norm.numpy(),
            feature_norm=scaled.feature_norm.numpy(),
            input_norms=torch.stack(input_norms).numpy(),
            mlp_norms=torch.stack([layer.mlp_norm for layer in tensors.layers]).numpy(),
            norm=tensors.norm.numpy(),
            eps=spec.rms_eps,
            heads=spec.num_heads,
            middle=spec.intermediate_size,
            norm_before_residual=spec.norm_before_residual,
            is_mtp=spec.kind == "mtp",
            num_first=self._num_first,
        )
        is_wide = tensors.embedding.dtype == torch.float32
        assert is_wide or tensors.embedding.dtype == torch.bfloat16, "a CPU's engine knows no other"
        self._table = tensors.embedding.numpy() if is_wide else np.empty((0, 0), np.float32)
        self._narrow = np.empty((0, 0), np.int16) if is_wide else tensors.embedding.view(torch.int16).numpy()
        self._ids = tensors.ids.numpy()
        self._draft = drafting(spec.head_dim, spec.num_heads // spec.num_kv_heads)
        blocks_each = -(-context_tokens // _BLOCK_TOKENS)
        self._contexts = HeadContexts(count=max_sequences, blocks_each=blocks_each, block_tokens=_BLOCK_TOKENS)
        shape = (max_sequences * blocks_each, spec.num_layers, 2, _BLOCK_TOKENS, spec.num_kv_heads, spec.head_dim)
        self._pool = np.zeros(shape, np.int16)  # pages are taken as they are written to
        self._rotated = np.ones(spec.num_layers, np.bool_)
        frequencies, self._rope_scale = inverse_frequencies(spec.rope, spec.head_dim, context_tokens)
        self._turns = frequencies.double().numpy()
        self._room = self._new_room(1)
        self._logits, self._rest = self._new_logits(1)
        self._scratch = self._new_scratch(1)

    @property
    def state_size(self) -> int:
        """Numbers of a token that it notes."""
        return len(self.layers) * self.spec.hidden_size

    def draft(
        self, rows: Sequence[StepRow], results: Sequence[RowSamples], states: NDArray[np.float32], firsts: Sequence[int]
    ) -> list[DraftPass]:
        """Note what a step has computed, and put into `results` what may follow, where a row asks for it.

        states: float32 [tokens, state_size], good until the next step. firsts: the index of each row's first token there.
        """
        begun_ns = time.clock_gettime_ns(CLOCK)
        jobs = self._noted(rows, results, states, firsts)
        if not jobs:
            return []
        asking = [index for index, job in enumerate(jobs) if job.row.num_samples]
        drafted = nothing_drafted(len(asking), max((jobs[index].row.drafts for index in asking), default=1))
        self._compute(jobs, asking, drafted)
        tokens, chances = drafted.tokens.tolist(), drafted.chances.tolist()
        for index, count, mine, sure in zip(asking, drafted.counts.tolist(), tokens, chances, strict=True):
            jobs[index].drafted.tokens, jobs[index].drafted.chances = mine[:count], sure[:count]
        num_tokens = [sum(len(job.nexts) for job in jobs), *drafted.num_rows[1:].tolist()]
        passes: list[DraftPass] = []
        for count, (seconds, nanoseconds) in zip(num_tokens, drafted.ends.tolist(), strict=False):
            if not count:
                break
            ended_ns = 1_000_000_000 * seconds + nanoseconds
            passes.append(DraftPass(count, (ended_ns - begun_ns) / 1e9))
            begun_ns = ended_ns
        return passes

    def _noted(
        self, rows: Sequence[StepRow], results: Sequence[RowSamples], states: NDArray[np.float32], firsts: Sequence[int]
    ) -> list[_Job]:
        """Note the states of each row's valid positions; return the rows with pairs to compute now."""
        jobs: list[_Job] = []
        for row, result, first in zip(rows, results, firsts, strict=True):
            if row.serial < 0:
                continue
            context = self._contexts.of(row.serial)
            proposed = max(0, row.num_samples - 1)
            known = list(row.tokens)
            if row.num_samples:
                accepted = accept(row.tokens[len(row.tokens) - proposed :], result.tokens)
                if result.tokens[accepted] == NO_TOKEN:
                    context.forget()
                    continue
                known = [*known[: len(known) - proposed + accepted], result.tokens[accepted]]
            count = len(known) - (row.num_samples > 0)
            context.note(row.start, states[first : first + count] * self._state_scale, known)
            is_far = row.prompt_tokens - row.start - len(row.tokens) > context.capacity  # before the end of a long prompt
            if row.drafts <= 0 or is_far:
                context.keep_latest(KEPT_STATES)
            elif context.nexts:
                jobs.append(_Job(row, context, *context.take(min(row.drafts, MAX_DRAFTS))))
                if row.num_samples:
                    result.drafted = jobs[-1].drafted
        return jobs

    def _compute(self, jobs: Sequence[_Job], asking: list[int], drafted: DraftResults) -> None:
        """Compute the pairs of all jobs, and draft behind those whose indices are `asking`. drafted: zeroed; it is filled."""
        counts = np.array([len(job.nexts) for job in jobs])
        tokens = [token for job in jobs for token in job.nexts]
        num_pairs = len(tokens)
        if num_pairs > len(self._room.residual):
            self._room = self._new_room(num_pairs)
        if len(asking) > len(self._logits):
            self._logits, self._rest = self._new_logits(len(asking))
            self._scratch = self._new_scratch(len(asking))
        within = np.arange(num_pairs) - np.repeat(counts.cumsum() - counts, counts)
        places, positions = np.array([job.place for job in jobs]), np.array([job.position for job in jobs])
        angles = (np.repeat(positions, counts) + within)[:, None] * self._turns
        held = np.array([len(job.context.blocks) for job in jobs])
        where = Step(
            positions=np.repeat(places, counts) + within,
            rows=np.repeat(np.arange(len(jobs)), counts),
            blocks=np.concatenate([job.context.blocks for job in jobs]),
            block_starts=held.cumsum() - held,
            pool=self._pool,
            rope=(np.concatenate((np.cos(angles), np.sin(angles)), 1) * self._rope_scale).astype(np.float32),
            rotated=self._rotated,
        )
        ask = np.array(asking, np.int64)
        step: tuple[Any, ...] = (
            counters_for_drafting(self.spec.num_layers, len(drafted.ends)),
            phases_of_a_pass(self.spec.num_layers),
            self.threads,
            self._weights,
            where,
            np.concatenate([job.states for job in jobs]),
            self._embedded(tokens),
            np.arange(num_pairs),
            (counts.cumsum() - 1)[ask],
            self._room,
            self._logits,
            self._rest,
            self._ids,
            _STANDS_OUT,
            rows_of([jobs[index].row for index in asking], ask, (places + counts)[ask], (positions + counts)[ask]),
            self._later(len(asking)),
            self._scratch,
            drafted,
        )
        together(self.threads, self._draft, *step)

    def _later(self, rows: int) -> LaterPasses:
        return LaterPasses(
            positions=np.empty(rows, np.int64),
            tables=np.empty(rows, np.int64),
            rope=np.empty((rows, self.spec.head_dim), np.float32),
            embedded=np.empty((rows, self.spec.hidden_size), np.float32),
            turns=self._turns,
            rope_scale=self._rope_scale,
            table=self._table,
            narrow=self._narrow,
        )

    def _embedded(self, tokens: list[int]) -> NDArray[np.float32]:
        if len(self._table):
            return self._table[tokens]
        return (self._narrow[tokens].astype(np.int32) << 16).view(np.float32)

    def _new_scratch(self, rows: int) -> Scratch:
        shape = (rows, self.spec.draft_vocab_size)
        return Scratch(np.empty(shape, np.float32), np.empty(shape, np.int32), np.empty(shape, np.float32))

    def _new_logits(self, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Memory for the logits of so many rows: of the first ids, and of the rest."""
        sizes = self._num_first, self.spec.draft_vocab_size - self._num_first
        first, rest = (np.empty((rows, _padded(size, LANES)), np.float32) for size in sizes)
        return first, rest

    def _new_room(self, rows: int) -> Room:
        """Memory for passes of so many pairs."""
        spec = self.spec
        attended = spec.num_heads * spec.head_dim
        widest = max(attended + 2 * spec.num_kv_heads * spec.head_dim, 2 * spec.intermediate_size)
        inputs = (spec.fc_inputs, spec.qkv_inputs, attended, spec.intermediate_size)
        return Room(
            residual=np.empty((rows, spec.hidden_size), np.float32),
            narrow=np.empty((rows, _padded(max(spec.hidden_size, attended), LANES)), np.float32),
            wide=np.empty((rows, _padded(widest, LANES)), np.float32),
            data=np.empty(rows * max(_padded(size, 2 * PAIRS) // 2 for size in inputs), np.int32),
            row_scale=np.empty(rows, np.float32),
        )


class _Evened(NamedTuple):
    """The first linear with columns of one size, and what makes up for that: factors of the target's states, and norms."""

    fc: torch.Tensor
    states: torch.Tensor
    feature_norm: torch.Tensor
    embedding_norm: torch.Tensor


def _evened(tensors: HeadTensors) -> _Evened:
    """Channels of the states differ by factors of thousands, and fc's columns make up for it: 8 bits need them alike.

    An MTP layer's fc reads what norms give, whose weights take the factors.
    """
    column = tensors.fc.square().mean(0).sqrt()
    column[column == 0] = 1.0
    fc = tensors.fc / column
    if tensors.spec.kind == "eagle3":
        return _Evened(fc, column, tensors.feature_norm, tensors.embedding_norm)
    feature, embedding = column.chunk(2)
    return _Evened(fc, torch.ones_like(feature), tensors.feature_norm * feature, tensors.embedding_norm * embedding)


def _packed_layer(layer: HeadLayerTensors) -> list[Int8Weight]:
    return [pack_int8(layer.qkv, layer.qkv_bias), *map(pack_int8, (layer.output, layer.gate_up, layer.down))]


def _packed_lm_head(tensors: HeadTensors) -> Int8Weight:
    """The target's own, where that is packed already."""
    lm_head = tensors.lm_head
    shared = None if isinstance(lm_head, torch.Tensor) else lm_head.int8
    return pack_int8(lm_head_rows(tensors)) if shared is None else shared


def _in_two(weight: Int8Weight, outputs: int) -> tuple[Int8Weight, Int8Weight]:
    """The first `outputs`, a multiple of `LANES` or all, and the others, which may be none. Nothing is copied."""
    blocks = -(-outputs // LANES)
    tiles, scale = weight.tiles, weight.scale
    assert weight.bias is None
    return Int8Weight(tiles[:blocks], scale[: blocks * LANES], None), Int8Weight(tiles[blocks:], scale[blocks * LANES :], None)


def _padded(size: int, to: int) -> int:
    return size + -size % to
