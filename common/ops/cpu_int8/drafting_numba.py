"""Drafts all tokens that a head proposes behind a step, in one compiled call that any number of threads make together:

    pass ─► logits of the first ids ─► choices ─► where none stands out: logits of the others ─► choices ─► next pass

Rows that want another token are moved to the front, with their features, and become the pairs of the next pass. Threads share
out the work as in `forward_numba`. A helper thread may start late, even after the call has returned to its caller. It must then
find nothing to do, so the numbers that control the loop are written once, in a place for each pass.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import math
import time
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from common.ops.cpu_int8.attention_numba import Step, attention
from common.ops.cpu_int8.choice_numba import NO_CHOICE, Draws, choose
from common.ops.cpu_int8.compiled_numba import compiled
from common.ops.cpu_int8.copy_numba import copy
from common.ops.cpu_int8.forward_numba import in_parts
from common.ops.cpu_int8.head_numba import PHASES_OF_A_LAYER, PHASES_OF_A_PASS, REST, run_pass, share_multiply
from common.ops.cpu_int8.team_numba import new_counters, shared

FIRST, ALL = range(2)
"""Which logits a choice is made from: those of the first ids, or of all."""

CLOCK = time.CLOCK_MONOTONIC
"""The clock of `DraftResults.ends`."""
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))


class DraftRows(NamedTuple):
    """State of the rows that tokens are drafted for, each array [rows]. It changes with every pass.

    active: int64, the row of each pair of the current pass; the first `num_rows` entries count.
    tables: int64, the block table of the row.
    places, positions: int64, of the row's next pair in the cache, and in the text.
    limits: int64, most tokens to draft.
    chances: float64, the probability that all tokens so far hold.
    least: float64; drafting ends once `chances` is lower.
    draws: sampling parameters.
    """

    active: NDArray[np.int64]
    tables: NDArray[np.int64]
    places: NDArray[np.int64]
    positions: NDArray[np.int64]
    limits: NDArray[np.int64]
    chances: NDArray[np.float64]
    least: NDArray[np.float64]
    draws: Draws


class LaterPasses(NamedTuple):
    """Inputs of passes behind the first one, with space for a pair of each row.

    positions, tables, rope: see `Step`; rope: float32 [pairs, size].
    embedded: float32 [pairs, hidden].
    turns: float64 [size / 2], radians per position.
    rope_scale: factor of cosines and sines.
    table: the embedding, float32 [vocab, hidden]; empty if `narrow` has it.
    narrow: the embedding, bfloat16 viewed as int16.
    """

    positions: NDArray[np.int64]
    tables: NDArray[np.int64]
    rope: NDArray[np.float32]
    embedded: NDArray[np.float32]
    turns: NDArray[np.float64]
    rope_scale: float
    table: NDArray[np.float32]
    narrow: NDArray[np.int16]


class DraftResults(NamedTuple):
    """What was drafted. All arrays are zero before the call, except for the first entry of num_rows.

    counts: int64 [rows], tokens drafted for each row.
    tokens, chances: int64 and float64 [rows, passes], the tokens and their probabilities.
    num_rows: int64 [passes + 1], rows that want a token from each pass.
    ends: int64 [passes, 2], seconds and nanoseconds at which each pass ended.
    found, sure: int64 and float64 [passes, 2, rows], the choices of each pass and their probabilities, by `FIRST` and `ALL`.
    """

    counts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    chances: NDArray[np.float64]
    num_rows: NDArray[np.int64]
    ends: NDArray[np.int64]
    found: NDArray[np.int64]
    sure: NDArray[np.float64]


_PHASES_OF_CHOICES = 4
"""Choices from the first ids, the other logits, choices from all ids, and the preparation of the next pass."""


def phases_of_a_pass(layers: int) -> int:
    """Return the number of phases (`team_numba`) of a pass with its choices."""
    return PHASES_OF_A_PASS + PHASES_OF_A_LAYER * layers + _PHASES_OF_CHOICES


def counters_for_drafting(layers: int, passes: int) -> NDArray[np.int64]:
    """Return the counters of one call."""
    return new_counters(passes * phases_of_a_pass(layers))


@compiled()
def _choose(row, number, among, num_rest, ids, rows, first_logits, rest_logits, scratch, drafted):
    """Choose the token of pair `row` of pass `number`. among: `FIRST` or `ALL`."""
    which = rows.active[row]
    logits = first_logits[row, : len(ids) - num_rest]
    others = rest_logits[row, : num_rest if among == ALL else 0]
    position = rows.positions[which] + 1
    token, chance = choose(
        logits, others, ids, rows.draws, which, position, scratch.scores[row], scratch.bits[row], scratch.weights[row]
    )
    drafted.found[number, among, row] = token
    drafted.sure[number, among, row] = chance


@compiled()
def _embed(token, later, out):
    """Write the embedding of a token into out: float32 [hidden]."""
    if len(later.table):
        copy(later.table[token], out)
        return
    bits = out.view(np.int32)
    for i in range(len(bits)):
        bits[i] = np.int32(later.narrow[token, i]) << np.int32(16)


@compiled()
def _go_on(_, number, among, rows, later, residual, drafted):
    """Record the choices of pass `number`, and prepare the next pass for the rows that want another token."""
    going = 0
    for row in range(drafted.num_rows[number]):
        which, token = rows.active[row], drafted.found[number, among, row]
        if token == NO_CHOICE:
            continue
        count, chance = drafted.counts[which], drafted.sure[number, among, row]
        drafted.tokens[which, count], drafted.chances[which, count] = token, chance
        drafted.counts[which] = count + 1
        rows.chances[which] *= chance
        if count + 1 == rows.limits[which] or rows.chances[which] < rows.least[which]:
            continue
        rows.active[going] = which
        if going != row:
            copy(residual[row], residual[going])
        later.positions[going], later.tables[going] = rows.places[which], rows.tables[which]
        half = len(later.turns)
        for i in range(half):
            angle = rows.positions[which] * later.turns[i]
            later.rope[going, i] = math.cos(angle) * later.rope_scale
            later.rope[going, half + i] = math.sin(angle) * later.rope_scale
        _embed(token, later, later.embedded[going])
        rows.places[which] += 1
        rows.positions[which] += 1
        going += 1
    drafted.num_rows[number + 1] = going
    _clock_gettime(CLOCK, drafted.ends[number].ctypes)


@compiled()
def _all_stand_out(sure, count, least):
    """Return whether the first `count` probabilities are at least `least`."""
    standing_out = 0
    for row in range(count):
        standing_out += sure[row] >= least
    return standing_out == count


_share_choose, _share_go_on = shared(_choose), shared(_go_on)

_run_pass: Any = None
"""`run_pass` for the attention heads that drafting is compiled for; see `drafting`."""


def _draft(
    counters,
    phases,
    threads,
    weights,
    where,
    states,
    embedded,
    every,
    wanted,
    room,
    logits,
    rest,
    ids,
    least,
    rows,
    later,
    scratch,
    drafted,
):
    """Run all passes and fill `drafted`.

    counters: new, of `counters_for_drafting`.
    phases: of a pass, see `phases_of_a_pass`.
    threads, weights, room: see `head_numba.run_pass`.
    where, states, embedded, every, wanted: inputs of the first pass, see there.
    logits, rest: float32 [≥ wanted, padded], memory for the logits of the first ids, and of the others.
    ids: int64 [draft vocabulary], the target's ids.
    least: probability from which on a choice among the first ids stands out.
    rows, later, scratch, drafted: see the classes.
    """
    pairs, no_states = len(embedded), np.empty((1, 0), np.float32)
    num_rest, residual = len(ids) - weights.num_first, room.residual
    behind = Step(later.positions, later.tables, where.blocks, where.block_starts, where.pool, later.rope, where.rotated)
    # LLVM inlines and optimises a function anew at each call site, so there is one call site of each
    for number in range(len(drafted.ends)):
        count = drafted.num_rows[number]
        if number > 0:
            if count == 0:
                break
            where, states, embedded, pairs, wanted = behind, no_states, later.embedded, count, every[:count]
        phase = phases * number
        phase = _run_pass(counters, phase, threads, weights, where, states, embedded, pairs, every, wanted, room, logits)
        for among in (FIRST, ALL):
            phase = _share_choose(counters, phase, count, (number, among, num_rest, ids, rows, logits, rest, scratch, drafted))
            if among == ALL or num_rest == 0 or _all_stand_out(drafted.sure[number, FIRST], count, least):
                break
            parts, linear = in_parts(REST, threads, count, weights, room, rest)
            phase = share_multiply(counters, phase, parts, linear)
        _share_go_on(counters, phases * number + phases - 1, 1, (number, among, rows, later, residual, drafted))


@cache
def drafting(size: int, group: int) -> Any:
    """Return `_draft` compiled for attention heads of `size`, `group` of which share a KV head; see `forward_numba.forward`."""
    scope = run_pass.__globals__ | {"_share_attend": shared(attention(size, group))}
    one = compiled(inlined=True)(FunctionType(run_pass.__code__, scope, f"pass_{size}_{group}"))
    draft = FunctionType(_draft.__code__, globals() | {"_run_pass": one}, f"draft_{size}_{group}")
    draft.__qualname__ = draft.__name__
    return compiled(kept=True)(draft)
