"""All that a head drafts behind a step, as one compiled call, which any number of threads make together:

    pass ─► logits of the first ids ─► choices ─► where none stands out: logits of the others ─► choices ─► what goes on ─► pass

The rows that want another token move to the front, with their features, and are the pairs of the next pass. Work is shared
out as in `forward_numba`. A thread may come late, when all is done: the numbers that tell it so are written once, by pass.
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
"""Choices among the first ids, and among all."""

CLOCK = time.CLOCK_MONOTONIC
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))


class Rows(NamedTuple):
    """Those that want tokens, for each of them; all change as the work goes on.

    active: int64, which row each pair of a pass is for. tables: int64, its block table. places, positions: int64, of its next
    pair in the cache, and in the text. limits: int64, tokens wanted at most. chances: float64, that all so far hold; with less
    than `least`, float64, there are no more. draws: how tokens are drawn.
    """

    active: NDArray[np.int64]
    tables: NDArray[np.int64]
    places: NDArray[np.int64]
    positions: NDArray[np.int64]
    limits: NDArray[np.int64]
    chances: NDArray[np.float64]
    least: NDArray[np.float64]
    draws: Draws


class Later(NamedTuple):
    """What passes behind the first one compute, for as many pairs as rows want tokens: see `Step`; rope: float32 [pairs, size].
    embedded: float32 [pairs, hidden]. turns: float64 [size / 2], radians of a position; cosines and sines are multiplied by
    rope_scale. table: the embedding, float32 [vocab, hidden]; or empty, and `narrow` has it, bfloat16 as int16."""

    positions: NDArray[np.int64]
    tables: NDArray[np.int64]
    rope: NDArray[np.float32]
    embedded: NDArray[np.float32]
    turns: NDArray[np.float64]
    rope_scale: float
    table: NDArray[np.float32]
    narrow: NDArray[np.int16]


class Drafted(NamedTuple):
    """All zeros at first. counts: int64 [rows], tokens of each; tokens, chances: [rows, passes].

    By pass: num_rows, int64 [passes + 1], which want a token; the first is given. ends: int64 [passes, 2], seconds and
    nanoseconds by `CLOCK`. found, sure: [passes, 2, rows], int64 and float64, the choices and their chances.
    """

    counts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    chances: NDArray[np.float64]
    num_rows: NDArray[np.int64]
    ends: NDArray[np.int64]
    found: NDArray[np.int64]
    sure: NDArray[np.float64]


_PHASES_OF_CHOICES = 4
"""Of a pass: choices, the rest of the logits, choices, and what goes on."""


def phases_of_a_pass(layers: int) -> int:
    return PHASES_OF_A_PASS + PHASES_OF_A_LAYER * layers + _PHASES_OF_CHOICES


def counters_for_drafting(layers: int, passes: int) -> NDArray[np.int64]:
    return new_counters(passes * phases_of_a_pass(layers))


@compiled()
def _choose(row, number, among, rest, ids, rows, first_logits, rest_logits, scratch, drafted):
    which = rows.active[row]
    logits = first_logits[row, : len(ids) - rest]
    others = rest_logits[row, : rest if among == ALL else 0]
    position = rows.positions[which] + 1
    token, chance = choose(
        logits, others, ids, rows.draws, which, position, scratch.scores[row], scratch.bits[row], scratch.weights[row]
    )
    drafted.found[number, among, row] = token
    drafted.sure[number, among, row] = chance


@compiled()
def _embed(token, later, out):
    if len(later.table):
        copy(later.table[token], out)
        return
    bits = out.view(np.int32)
    for i in range(len(bits)):
        bits[i] = np.int32(later.narrow[token, i]) << np.int32(16)


@compiled()
def _go_on(_, number, among, rows, later, residual, drafted):
    """Take the choices of a pass. Prepare the next one for those that want another token."""
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
    standing_out = 0
    for row in range(count):
        standing_out += sure[row] >= least
    return standing_out == count


_share_choose, _share_go_on = shared(_choose), shared(_go_on)

_run_pass: Any = None
"""Of the heads that drafting is compiled for."""


def _draft(
    counters,
    phases,
    threads,
    weights,
    where,
    states,
    embedded,
    pairs,
    every,
    wanted,
    room,
    logits,
    rest,
    ids,
    least,
    no_states,
    rows,
    later,
    scratch,
    drafted,
):
    """counters: of `counters_for_drafting`, new; phases: of a pass. What follows, up to `logits`, those of the first ids, is
    for the first pass: see `head_numba.run_pass`. rest: float32 [≥ wanted, padded], the logits of the other ids. ids: int64
    [draft vocabulary], the target's. least: probability with which a token stands out among the first. no_states: float32
    [any, 0]. The others are a `Rows`, a `Later`, a `Scratch` and a `Drafted`."""
    num_rest, residual = len(ids) - weights.num_first, room.residual
    behind = Step(later.positions, later.tables, where.blocks, where.block_starts, where.pool, later.rope, where.rotated)
    # each function has one call: what is called takes the place of its call, and is compiled there
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
    """Drafting with heads of `size`, `group` of which share a KV head; see `forward_numba.forward`."""
    scope = run_pass.__globals__ | {"_share_attend": shared(attention(size, group))}
    one = compiled(inlined=True)(FunctionType(run_pass.__code__, scope, f"pass_{size}_{group}"))
    draft = FunctionType(_draft.__code__, globals() | {"_run_pass": one}, f"draft_{size}_{group}")
    draft.__qualname__ = draft.__name__
    return compiled(kept=True)(draft)
