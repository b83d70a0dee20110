"""A pass of a head that drafts from its target's hidden states, with 8-bit linears: a part of `drafting_numba`.

A pass computes pairs of a feature, what the target knows at position p, and the embedding of the token at p + 1. EAGLE-3:

    states ─► fc ─► x ─► norm ┐
    embeddings ───────► norm ┴─► QKV ─► rotate, write KV ─► attend ─► output + x ─► MLP ─► x' ─► norm ─► head

Multi-token prediction (MTP):

    states ────► norm ┐
    embeddings ► norm ┴─► fc ─► x ─► norm ─► QKV ─► … ─► x' ─► norm ─► head

Further layers stand between x' and the last norm, and each reads what the one before left:

    x ─► norm ─► QKV ─► rotate, write KV ─► attend ─► output + x ─► MLP ─► x'

The logits are those of the token at p + 2. A pass computes them for the first rows of lm_head; most passes do not need the
others. The feature of the pair behind is x', and of MTP the norm of x'. Work is shared
out as in `forward_numba`, whose kernels these are.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.ops.cpu_int8.attention_numba import place_kv
from common.ops.cpu_int8.compiled_numba import compiled
from common.ops.cpu_int8.copy_numba import copy
from common.ops.cpu_int8.forward_numba import PARTS_PER_THREAD, in_parts, keep_rows
from common.ops.cpu_int8.products_numba import (
    add_and_normalise,
    gate,
    multiply,
    normalise,
    quantise,
    quantise_row,
    rms_normalise,
)
from common.ops.cpu_int8.team_numba import shared
from common.ops.cpu_int8.weights import Linears

PHASES_OF_A_PASS, PHASES_OF_A_LAYER = 8, 10
"""At most: of a pass but for its layers, and of each layer."""

FC, HEAD, REST = range(3)
"""Places of three linears; four of each layer are behind them: QKV, output, gate and up, down. REST: the rows of lm_head that
are not in HEAD."""


class HeadWeights(NamedTuple):
    """linears: see `FC`. Norms: float32 [hidden], of embeddings, of features and before the head; float32 [layers, hidden]:
    input_norms, before attention, of which an EAGLE-3 head's first is not read, and mlp_norms. middle: the size between gate
    and down. norm_before_residual: see `HeadSpec`. num_first: the rows of lm_head that are in HEAD."""

    linears: Linears
    embedding_norm: NDArray[np.float32]
    feature_norm: NDArray[np.float32]
    input_norms: NDArray[np.float32]
    mlp_norms: NDArray[np.float32]
    norm: NDArray[np.float32]
    eps: float
    heads: int
    middle: int
    norm_before_residual: bool
    is_mtp: bool
    num_first: int


@compiled()
def _pair(row, rows, first, second, first_norm, second_norm, eps, keeps_normed, data, row_scale):
    """Both halves of a pair, each normalised, side by side and quantised. keeps_normed: the second stays normalised."""
    size = len(first_norm)
    both = np.empty(2 * size, np.float32)
    rms_normalise(first[row], first_norm, eps, both[:size])
    rms_normalise(second[row], second_norm, eps, both[size:])
    if keeps_normed:
        copy(both[size:], second[row])
    quantise_row(both, row, rows, data, row_scale)


@compiled()
def _keep_normed(row, residual, weight, eps):
    rms_normalise(residual[row], weight, eps, residual[row])


@compiled()
def _place(row, step, heads, layer, qkv):
    """`place_kv` by the row's own angles, without norms of heads."""
    nothing = np.empty(0, np.float32)
    place_kv(row, step, heads, nothing, nothing, layer, 0.0, step.rope[row], qkv)


_share_pair, _share_place, _share_keep, _share_gate = map(shared, (_pair, _place, keep_rows, gate))
share_multiply, _share_quantise, _share_add = map(shared, (multiply, quantise, add_and_normalise))
_share_normalise, _share_keep_normed = map(shared, (normalise, _keep_normed))


@compiled()
def _enter_eagle(counters, phase, threads, weights, states, embedded, pairs, room):
    """Leaves x in room.residual, and what QKV multiply in room.data. Returns the next phase."""
    residual, integers = room.residual, (room.data, room.row_scale)
    if states.shape[1]:
        phase = _share_quantise(counters, phase, pairs, (pairs, states, states.shape[1], *integers))
        parts, linear = in_parts(FC, threads, pairs, weights, room, residual)
        phase = share_multiply(counters, phase, parts, linear)
    norms = (weights.embedding_norm, weights.feature_norm, weights.eps, weights.norm_before_residual)
    return _share_pair(counters, phase, pairs, (pairs, embedded, residual, *norms, *integers))


@compiled()
def _enter_mtp(counters, phase, threads, weights, states, embedded, pairs, room):
    """As `_enter_eagle`."""
    residual, integers = room.residual, (room.data, room.row_scale)
    features = states if states.shape[1] else residual
    norms = (weights.feature_norm, weights.embedding_norm, weights.eps, False)
    phase = _share_pair(counters, phase, pairs, (pairs, features, embedded, *norms, *integers))
    parts, linear = in_parts(FC, threads, pairs, weights, room, residual)
    phase = share_multiply(counters, phase, parts, linear)
    return _share_normalise(counters, phase, pairs, (pairs, residual, weights.input_norms[0], weights.eps, *integers))


_share_attend: Any = None
"""Of the heads that a pass is compiled for."""


def run_pass(counters, phase, threads, weights, where, states, embedded, pairs, every, wanted, room, logits):
    """counters: new ones from `phase` on. where: a `Step` whose pool has the head's layers, whose positions count from where
    each row's cache begins, and whose rope has a row for each pair. every: int64, 0 …. states: float32 [pairs, layers ·
    hidden], the target's; or [any, 0] where room.residual holds features. embedded: float32 [≥ pairs, hidden]. wanted: int64,
    ascending: the pairs behind which tokens are drafted; the features behind them are in room.residual afterwards. logits:
    float32 [≥ wanted, padded], of HEAD. Returns the next phase.

    K and V of all pairs are written."""
    residual, narrow, wide, integers = room.residual, room.narrow, room.wide, (room.data, room.row_scale)
    eps, heads, rows, asking = weights.eps, weights.heads, pairs, every
    layers, kv_heads, size = len(weights.mlp_norms), where.pool.shape[4], where.pool.shape[5]
    if weights.is_mtp:
        phase = _enter_mtp(counters, phase, threads, weights, states, embedded, pairs, room)
    else:
        phase = _enter_eagle(counters, phase, threads, weights, states, embedded, pairs, room)
    for layer in range(layers):
        first = REST + 1 + 4 * layer
        parts, linear = in_parts(first, threads, pairs, weights, room, wide)
        phase = share_multiply(counters, phase, parts, linear)
        phase = _share_place(counters, phase, pairs, (where, heads, layer, wide))
        if layer == layers - 1:
            rows, asking = len(wanted), wanted
            phase = _share_keep(counters, phase, 1, (wanted, residual))
        splits = kv_heads if rows < PARTS_PER_THREAD * threads else 1
        phase = _share_attend(counters, phase, rows * splits, (splits, where, asking, layer, size**-0.5, wide, narrow))
        phase = _share_quantise(counters, phase, rows, (rows, narrow, heads * size, *integers))
        parts, linear = in_parts(first + 1, threads, rows, weights, room, narrow)
        phase = share_multiply(counters, phase, parts, linear)
        phase = _share_add(counters, phase, rows, (rows, residual, narrow, weights.mlp_norms[layer], eps, *integers))
        parts, linear = in_parts(first + 2, threads, rows, weights, room, wide)
        phase = share_multiply(counters, phase, parts, linear)
        phase = _share_gate(counters, phase, rows, (rows, wide, weights.middle, *integers))
        parts, linear = in_parts(first + 3, threads, rows, weights, room, narrow)
        phase = share_multiply(counters, phase, parts, linear)
        following = weights.norm if layer == layers - 1 else weights.input_norms[layer + 1]
        phase = _share_add(counters, phase, rows, (rows, residual, narrow, following, eps, *integers))
    parts, linear = in_parts(HEAD, threads, rows, weights, room, logits)
    phase = share_multiply(counters, phase, parts, linear)
    if weights.is_mtp:
        phase = _share_keep_normed(counters, phase, rows, (residual, weights.norm, eps))
    return phase
