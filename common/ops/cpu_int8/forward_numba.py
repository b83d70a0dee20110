"""A whole step of the 8-bit engine on a CPU as one compiled call, which any number of threads make together.

Between kernels there is no interpreter: a small model's kernels take microseconds, and its lock may be another thread's for
longer. Every thread runs `forward` with the same arguments, and `team_numba` shares out the work. What a part computes does not
depend on who computes it, nor on how many parts there are.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.ops.cpu_int8.attention_numba import attention, write_kv
from common.ops.cpu_int8.compiled_numba import compiled
from common.ops.cpu_int8.copy_numba import copy
from common.ops.cpu_int8.products_numba import add_and_normalise, gate, multiply, normalise, quantise
from common.ops.cpu_int8.team_numba import new_counters, shared
from common.ops.cpu_int8.weights import Linears

PARTS_PER_THREAD = 4
"""Of a linear: enough for a thread that is held up to be made up for."""

_PHASES_PER_LAYER, _OTHER_PHASES = 10, 12


class Weights(NamedTuple):
    """linears: four of each layer (qkv, output, gate and up, down), then the head. embedding: float32 [vocab, hidden]. Norms:
    float32 [layers, size], those of heads [layers, 0] where there are none; norm: [hidden], the last one. middle: the size
    between gate and down."""

    linears: Linears
    embedding: NDArray[np.float32]
    input_norms: NDArray[np.float32]
    q_norms: NDArray[np.float32]
    k_norms: NDArray[np.float32]
    mlp_norms: NDArray[np.float32]
    norm: NDArray[np.float32]
    eps: float
    heads: int
    middle: int


class Room(NamedTuple):
    """Memory of a step for at least as many rows as it has tokens. float32 [rows, …]: residual; narrow for what attention, or
    a linear into the residual, makes; wide for the other linears. data, row_scale: activations, see `int8_numba`."""

    residual: NDArray[np.float32]
    narrow: NDArray[np.float32]
    wide: NDArray[np.float32]
    data: NDArray[np.int32]
    row_scale: NDArray[np.float32]


def counters_for(layers: int) -> NDArray[np.int64]:
    return new_counters(_PHASES_PER_LAYER * layers + _OTHER_PHASES)


@compiled()
def _embed(row, tokens, embedding, residual):
    copy(embedding[tokens[row]], residual[row])


@compiled()
def keep_rows(_, wanted, residual):
    """Rows `wanted`, ascending, to the front."""
    for index in range(len(wanted)):
        if wanted[index] != index:
            copy(residual[wanted[index]], residual[index])


@compiled()
def _note(row, place, residual, noted):
    """noted[row, place] = residual[row]; noted: float32 [rows, places · size]."""
    size = residual.shape[1]
    for i in range(size):
        noted[row, place * size + i] = residual[row, i]


@compiled()
def _add(index, first, residual, delta):
    """residual[first + index] += delta[first + index, :size]"""
    for i in range(residual.shape[1]):
        residual[first + index, i] += delta[first + index, i]


_share_embed, _share_normalise, _share_multiply, _share_write_kv = map(shared, (_embed, normalise, multiply, write_kv))
_share_keep, _share_quantise, _share_add, _share_gate = map(shared, (keep_rows, quantise, add_and_normalise, gate))
_share_add_only, _share_note = shared(_add), shared(_note)


@compiled()
def in_parts(which, threads, rows, weights, room, out):
    """What `multiply` takes, with how many parts in front."""
    linears = weights.linears
    parts = 1 if threads == 1 else min(linears[which].blocks, PARTS_PER_THREAD * threads)
    return parts, (parts, linears, which, room.data, room.row_scale, rows, out)


_share_attend: Any = None
"""Of the heads that a step is compiled for."""


def _step(counters, threads, weights, where, tokens, every, samples, num_logits, room, logits, layers_noted, noted):
    """counters: of `counters_for`, new. where: a `Step`. tokens: int64 [tokens]; every: their indices, 0 …; samples: those
    that are wanted, ascending. logits: float32 [≥ num_logits, vocab, padded to `LANES`], of the first `num_logits` samples.
    layers_noted: int64 [places], rising: before which layers every token's residual is noted, in noted: float32
    [≥ tokens, places · hidden]; the number of layers stands for behind the last one, which then computes every token.

    K and V are written in any case. The last norm of residual's first rows are the samples' final states."""
    residual, narrow, wide, integers = room.residual, room.narrow, room.wide, (room.data, room.row_scale)
    eps, heads, rows, wanted = weights.eps, weights.heads, len(tokens), every
    layers, kv_heads, size = len(weights.input_norms), where.pool.shape[4], where.pool.shape[5]
    place, places = 0, len(layers_noted)
    is_whole = places > 0 and layers_noted[places - 1] == layers
    phase = _share_embed(counters, 0, rows, (tokens, weights.embedding, residual))
    phase = _share_normalise(counters, phase, rows, (rows, residual, weights.input_norms[0], eps, *integers))
    for layer in range(layers):
        if place < places and layers_noted[place] == layer:
            phase = _share_note(counters, phase, rows, (place, residual, noted))
            place += 1
        parts, linear = in_parts(4 * layer, threads, rows, weights, room, wide)
        phase = _share_multiply(counters, phase, parts, linear)
        norms = (weights.q_norms, weights.k_norms, layer, eps)
        phase = _share_write_kv(counters, phase, rows, (where, heads, *norms, wide))
        if layer == layers - 1 and not is_whole:
            rows, wanted = len(samples), samples
            phase = _share_keep(counters, phase, 1, (wanted, residual))
        splits = kv_heads if rows < PARTS_PER_THREAD * threads else 1
        phase = _share_attend(counters, phase, rows * splits, (splits, where, wanted, layer, size**-0.5, wide, narrow))
        phase = _share_quantise(counters, phase, rows, (rows, narrow, heads * size, *integers))
        parts, linear = in_parts(4 * layer + 1, threads, rows, weights, room, narrow)
        phase = _share_multiply(counters, phase, parts, linear)
        phase = _share_add(counters, phase, rows, (rows, residual, narrow, weights.mlp_norms[layer], eps, *integers))
        parts, linear = in_parts(4 * layer + 2, threads, rows, weights, room, wide)
        phase = _share_multiply(counters, phase, parts, linear)
        phase = _share_gate(counters, phase, rows, (rows, wide, weights.middle, *integers))
        parts, linear = in_parts(4 * layer + 3, threads, rows, weights, room, narrow)
        phase = _share_multiply(counters, phase, parts, linear)
        if layer < layers - 1:
            following = weights.input_norms[layer + 1]
            phase = _share_add(counters, phase, rows, (rows, residual, narrow, following, eps, *integers))
    if is_whole:
        phase = _share_add_only(counters, phase, rows, (0, residual, narrow))
        phase = _share_note(counters, phase, rows, (place, residual, noted))
        phase = _share_keep(counters, phase, 1, (samples, residual))
        phase = _share_normalise(counters, phase, num_logits, (num_logits, residual, weights.norm, eps, *integers))
    else:
        phase = _share_add(counters, phase, num_logits, (num_logits, residual, narrow, weights.norm, eps, *integers))
        phase = _share_add_only(counters, phase, rows - num_logits, (num_logits, residual, narrow))
    parts, linear = in_parts(4 * layers, threads, num_logits, weights, room, logits)
    _share_multiply(counters, phase, parts, linear)


@cache
def forward(size: int, group: int) -> Any:
    """The step for heads of `size`, `group` of which share a KV head; both are compiled in.

    Attention is a global of a copy of the step, not a variable around it: what a kept function closes over is part of its key,
    and a compiled function is another one in every process.
    """
    scope = globals() | {"_share_attend": shared(attention(size, group))}
    step = FunctionType(_step.__code__, scope, f"step_{size}_{group}")
    step.__qualname__ = step.__name__
    return compiled(kept=True)(step)
