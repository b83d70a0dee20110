"""A runner without a model: its times come from a roofline, its tokens from a hash of the KV it reads.

Each position's eight bytes of KV hold a running hash of the tokens up to there. The token sampled at position p is a
function of the hash stored at p, of the hash stored at one earlier position drawn from p ("attention"), of the seed and
of p + 1. So a block that is stale, lost, swapped or half copied changes the tokens, and `expected_tokens`, which sees
only the prompt and the seed, says what they should have been. Greedy (temperature 0) ignores the seed.

The hash is h[p] = A · h[p-1] + g(token[p]) mod 2^64 with odd A: invertible, hence one cumulative sum over all rows of a
step. Hundreds of workers run in one machine: about 2 µs for a row of a full decode step.

With several cache groups, each keeps the same hashes in blocks of its own. A row reads what a group keeps of the positions
before it, and a hash there that is not the first group's spoils the hashes from there on. "Attention" reads the first group,
which keeps the most: where that is a window, the earlier position is drawn from the window.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from common.cache.retention import KEEP_ALL, Retention
from common.engine.masks import allowed_tokens, fill_masks
from common.engine.plan import LaterStep, RowSamples, StepPlan, StepResult, StepRow, resolve_feeds
from common.engine.simulated import roofline
from common.protocol.errors import ConfigError
from common.protocol.messages import SamplingParams, TokenLogprobs

BYTES_PER_TOKEN = 8
RESERVED = frozenset({0, 1, 2})
"""Ids that are never sampled by default: most vocabularies keep their special tokens there."""

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # A: odd, so that it has an inverse mod 2^64
_STEP_INVERSE = pow(_STEP, -1, 1 << 64)
_EMPTY = 0x243F6A8885A308D3  # h[-1]
_ATTEND = 0xA4093822299F31D0
_RING = 64
_LOGPROB = -0.5
STATE_SIZE = 16
"""Numbers of a hidden state."""


def _mix(value: int) -> int:
    """SplitMix64's finaliser. `_mix_array` is the same over uint64 arrays."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


_C0, _C1, _C2 = (np.array([c], np.uint64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_S30, _S27, _S31 = (np.array([s], np.uint64) for s in (30, 27, 31))


def _mix_array(values: U64) -> U64:
    values = values + _C0
    values = (values ^ (values >> _S30)) * _C1
    values = (values ^ (values >> _S27)) * _C2
    return values ^ (values >> _S31)


@functools.lru_cache(maxsize=8)
def _powers(length: int) -> tuple[U64, U64]:
    """A^1 … A^length and A^-1 … A^-length mod 2^64, uint64 [length] each."""
    return (
        np.multiply.accumulate(np.full(length, _STEP, np.uint64)),
        np.multiply.accumulate(np.full(length, _STEP_INVERSE, np.uint64)),
    )


@functools.lru_cache(maxsize=8)
def _allowed(vocab_size: int, reserved: frozenset[int]) -> I64:
    ids = np.array([token for token in range(vocab_size) if token not in reserved], np.int64)
    if not len(ids):
        raise ConfigError(f"a vocabulary of {vocab_size} with {len(reserved)} reserved ids leaves nothing to sample")
    return ids


def _noise(sampling: SamplingParams) -> int:
    return _mix(sampling.seed & _MASK) if sampling.temperature > 0 else 0


class TokenRule:
    """Which token follows: `vocab_size` ids without the `reserved` ones.

    `repetition` in [0, 1] is the share of tokens that follow from the token before alone, out of 64 ids: text on which
    n-gram drafting finds something (0: white noise). `mean_output_tokens` > 0 makes the request's first stop id come up
    with that mean distance (0: never of its own accord). `reads`: what the first cache group keeps.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        reserved: Collection[int] = RESERVED,
        repetition: float = 0.0,
        mean_output_tokens: int = 0,
        reads: Retention = KEEP_ALL,
    ) -> None:
        self.vocab_size = vocab_size
        self.reads = reads
        self.allowed = _allowed(vocab_size, frozenset(reserved))
        self.ring = self.allowed[:_RING]
        self.threshold = int(repetition * (1 << 32))
        self.mean_output_tokens = mean_output_tokens

    def choose(self, drawn: U64, last: U64) -> list[int]:
        """drawn, last: uint64 [samples]; the draw, and the input token before each sample."""
        if not self.threshold:
            return self.allowed[(drawn % np.uint64(len(self.allowed))).astype(np.int64)].tolist()
        follow = (drawn >> np.uint64(32)) < np.uint64(self.threshold)
        index = np.where(follow, _mix_array(last), drawn) % np.uint64(len(self.ring))
        return self.ring[index.astype(np.int64)].tolist()

    def choose_allowed(self, allowed: NDArray[np.bool_], drawn: int) -> int:
        """One of the tokens that a constraint allows, bool [vocab_size]; a reserved one only if there are no others."""
        ordinary = self.allowed[allowed[self.allowed]]
        ids = ordinary if len(ordinary) else np.flatnonzero(allowed)
        return int(ids[drawn % len(ids)])

    def settle(self, token: int, drawn: int, sampling: SamplingParams, output_index: int) -> int:
        """`token`, or the stop id that ends the text here, or the next id that may stand before `min_tokens`."""
        stop = sampling.stop_token_ids
        if not stop:
            return token
        if self.mean_output_tokens and (drawn >> 16) % self.mean_output_tokens == 0:
            token = stop[0]
        if output_index < sampling.min_tokens and token in stop:
            for offset in range(len(stop) + 1):
                candidate = int(self.allowed[(drawn + offset) % len(self.allowed)])
                if candidate not in stop:
                    return candidate
        return token


def expected_tokens(prompt: Sequence[int], sampling: SamplingParams, num_tokens: int, *, rule: TokenRule) -> list[int]:
    """The oracle: the `num_tokens` tokens after `prompt`, computed without blocks, steps or storage. Stop ids don't end it."""
    hashes, noise = _hashes(prompt), _noise(sampling)
    last = prompt[-1]
    output: list[int] = []
    for index in range(num_tokens):
        position = len(hashes) - 1
        first = rule.reads.first_token(position)
        attended = hashes[first + _mix(position ^ _ATTEND) % (position + 1 - first)]
        drawn = _mix(hashes[position] ^ _mix(attended ^ noise ^ _mix(position + 1)))
        if rule.threshold:
            pick = _mix(last) if (drawn >> 32) < rule.threshold else drawn
            token = int(rule.ring[pick % len(rule.ring)])
        else:
            token = int(rule.allowed[drawn % len(rule.allowed)])
        last = rule.settle(token, drawn, sampling, index)
        output.append(last)
        hashes.append((_STEP * hashes[-1] + _mix(last)) & _MASK)
    return output


def expected_scores(prompt: Sequence[int]) -> list[float]:
    """The log-probabilities of a prompt's tokens behind the first one."""
    hashes = np.array(_hashes(prompt[:-1]), np.uint64)
    return _scores(hashes, np.array(prompt[1:], np.uint64)).tolist()


def expected_total(prompt: Sequence[int]) -> I64:
    """The hidden states of a prompt, added up in units of `FIXED_POINT`: int64 [STATE_SIZE]."""
    return _states(np.array(_hashes(prompt), np.uint64)).sum(0)


def _hashes(tokens: Sequence[int]) -> list[int]:
    hashes: list[int] = []
    running = _EMPTY
    for token in tokens:
        running = (_STEP * running + _mix(token)) & _MASK
        hashes.append(running)
    return hashes


def _scores(hashes: U64, targets: U64) -> NDArray[np.float64]:
    """Of each target behind the text whose hash stands before it."""
    return -(1.0 + (_mix_array(hashes ^ _mix_array(targets)) >> np.uint64(40)) / (1 << 22))


def _states(hashes: U64) -> I64:
    """int64 [positions, STATE_SIZE], within 1 in units of `FIXED_POINT`."""
    mixed = _mix_array(hashes[:, None] ^ np.arange(1, STATE_SIZE + 1, dtype=np.uint64))
    return (mixed >> np.uint64(35)).astype(np.int64) - (1 << 28)


class SimulatedRunner:
    """`plan.Runner` without a model.

    storage: uint8 [num_blocks, block_tokens * 8], zeroed or not; shared memory as a rule. It is the first cache group's, which
    keeps what the rule reads; `more`: storage and retention of each other group, which keeps no more.
    `execute` sleeps until the profile's time for the step, times `time_scale`, has passed; 0 never sleeps. `run_ahead` as of
    any runner.

    :raises ConfigError: for an unknown profile name, a storage of another shape, a vocabulary with nothing to sample, or groups
        of which none keeps the token before a step's first.
    """

    def __init__(
        self,
        profile: roofline.Profile | str,
        *,
        storage: NDArray[np.uint8],
        block_tokens: int,
        max_context: int,
        vocab_size: int,
        fingerprint: str,
        time_scale: float = 1.0,
        rule: TokenRule | None = None,
        run_ahead: int = 1,
        more: Sequence[tuple[NDArray[np.uint8], Retention]] = (),
    ) -> None:
        block_bytes = block_tokens * BYTES_PER_TOKEN
        for one in (storage, *(other for other, _ in more)):
            if one.dtype != np.uint8 or one.ndim != 2 or one.shape[1] != block_bytes:
                found = f"{one.dtype} {list(one.shape)}"
                raise ConfigError(f"a simulated engine's storage must be uint8 [num_blocks, {block_bytes}], not {found}")
        self.profile = roofline.profile(profile) if isinstance(profile, str) else profile
        self.storage = storage
        self.block_tokens = block_tokens
        self.num_blocks = storage.shape[0]
        self.max_context = max_context
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint
        self.time_scale = time_scale
        self.rule = rule or TokenRule(vocab_size)
        if self.rule.reads.chunk or self.rule.reads.window == 1:
            raise ConfigError("the simulated engine needs a cache group that keeps the token before a step's first")
        self.run_ahead = run_ahead
        self._sampled: list[int] = []
        self._hashes: U64 = storage.view(np.uint64)
        self._more: list[tuple[U64, Retention]] = [(other.view(np.uint64), retention) for other, retention in more]

    def expected_tokens(self, prompt: Sequence[int], sampling: SamplingParams, num_tokens: int) -> list[int]:
        return expected_tokens(prompt, sampling, num_tokens, rule=self.rule)

    def execute(self, plan: StepPlan) -> StepResult:
        """:raises IndexError: if a row's blocks don't cover its positions, or name blocks that don't exist."""
        begun = time.perf_counter()
        rows = resolve_feeds(plan, self._sampled)
        hashes = self._hashes, *(others for others, _ in self._more)
        for group, source, target in plan.copies:
            hashes[group][target] = hashes[group][source]
        samples = self._run(rows) if rows else []
        self._sampled = [token for row in samples for token in row.tokens]
        remaining = self.step_s(rows) * self.time_scale - (time.perf_counter() - begun)
        if remaining > 0:
            time.sleep(remaining)
        return StepResult(rows=samples, elapsed_s=time.perf_counter() - begun)

    def submit(self, plan: StepPlan) -> LaterStep:
        return LaterStep(self, plan)

    def may_compile(self, plan: StepPlan) -> bool:
        return False

    def step_s(self, rows: Sequence[StepRow]) -> float:
        """Seconds the profile's accelerator takes for these rows."""
        num_tokens = kv_tokens = pairs = 0
        for row in rows:
            count = len(row.tokens)
            num_tokens += count
            kv_tokens += row.start + count
            pairs += count * row.start + count * (count + 1) // 2
        return self.profile.step_s(num_tokens=num_tokens, kv_tokens=kv_tokens, pairs=pairs)

    def _run(self, rows: Sequence[StepRow]) -> list[RowSamples]:
        size = self.block_tokens
        lengths = np.array([len(row.tokens) for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        ends = np.cumsum(lengths)
        firsts = ends - lengths  # flat index of each row's first token
        tokens = np.fromiter(itertools.chain.from_iterable([row.tokens for row in rows]), np.uint64, int(ends[-1]))
        within = np.arange(len(tokens)) - np.repeat(firsts, lengths)
        positions = np.repeat(starts, lengths) + within
        blocks = self._blocks_of(rows, [row.blocks for row in rows], lengths, positions)

        last_blocks = np.array([row.blocks[(row.start - 1) // size] if row.start else 0 for row in rows], np.int64)
        before = np.where(starts > 0, self._hashes[last_blocks, (starts - 1) % size], np.uint64(_EMPTY)) ^ self._damage(rows)
        powers, inverses = _powers(1 << int(lengths.max() - 1).bit_length())
        sums = np.cumsum(_mix_array(tokens) * inverses[within], dtype=np.uint64)
        sums_before = np.where(firsts > 0, sums[firsts - 1], np.uint64(0))
        hashes = powers[within] * (sums + np.repeat(before - sums_before, lengths))
        self._hashes[blocks, positions % size] = hashes
        for index, (others, _) in enumerate(self._more):
            tables = [row.more_blocks[index] for row in rows]
            others[self._blocks_of(rows, tables, lengths, positions), positions % size] = hashes

        counts = np.array([row.num_samples for row in rows], np.int64)
        total = int(counts.sum())
        if not total:
            return self._read(rows, hashes, ends, [RowSamples(tokens=[]) for _ in rows])
        sample_ends = np.cumsum(counts)
        index = np.repeat(ends - sample_ends, counts) + np.arange(total)  # flat index of each sampled position
        drawn = self._draw(rows, counts, positions[index], hashes[index])
        return self._read(rows, hashes, ends, self._samples(rows, self.rule.choose(drawn, tokens[index]), drawn))

    def _read(self, rows: Sequence[StepRow], hashes: U64, ends: I64, results: list[RowSamples]) -> list[RowSamples]:
        """Put into `results` what rows are read for. `ends`: where each row's tokens end in the step."""
        for row, end, result in zip(rows, ends.tolist(), results, strict=True):
            if not row.num_read:
                continue
            mine = hashes[end - row.num_read : end]
            if row.targets:
                scores = _scores(mine, np.array(row.targets, np.uint64)).tolist()
                top = range(max(row.sampling.logprobs, 0))
                values = tuple(-0.125 * (1 + rank) for rank in top)
                result.scores = [TokenLogprobs(score, tuple(top), values, 1 + len(top)) for score in scores]
            else:
                result.total = _states(mine).sum(0)
        return results

    def _damage(self, rows: Sequence[StepRow]) -> U64:
        """Bits that differ between the first group and the others in what the rows read of it, uint64 [rows].

        :raises IndexError: if a row reads a block that a group has let go of.
        """
        size, damage = self.block_tokens, np.zeros(len(rows), np.uint64)
        for index, (others, retention) in enumerate(self._more):
            for at, row in enumerate(rows):
                kept = max(retention.first_token(row.start), self.rule.reads.first_token(row.start))
                read = np.arange(kept, row.start)
                entries = (read // size).tolist()
                blocks = np.array([row.more_blocks[index][entry] for entry in entries], np.int64)
                if len(blocks) and blocks.min() < 0:
                    raise IndexError("a row reads a block that its group has let go of")
                first = np.array([row.blocks[entry] for entry in entries], np.int64)
                differ = self._hashes[first, read % size] ^ others[blocks, read % size]
                damage[at] |= np.bitwise_or.reduce(differ)
        return damage

    def _blocks_of(self, rows: Sequence[StepRow], tables: Sequence[Sequence[int]], lengths: I64, positions: I64) -> I64:
        """The block of each flat position in the rows' block tables of a group, int64 [tokens]."""
        size = self.block_tokens
        if len(positions) == len(rows):
            return np.array([table[row.start // size] for row, table in zip(rows, tables, strict=True)], np.int64)
        first = np.array([row.start // size for row in rows], np.int64)
        last = np.array([(row.start + len(row.tokens) - 1) // size for row in rows], np.int64)
        spans = [table[i : j + 1] for table, i, j in zip(tables, first.tolist(), last.tolist(), strict=True)]
        widths = last - first + 1
        if [len(span) for span in spans] != widths.tolist():
            raise IndexError("a row's blocks don't cover its positions")
        flat = np.fromiter(itertools.chain.from_iterable(spans), np.int64)
        shift = np.cumsum(widths) - widths - first
        return flat[np.repeat(shift, lengths) + positions // size]

    def _draw(self, rows: Sequence[StepRow], counts: I64, positions: I64, hashes: U64) -> U64:
        """One uint64 per sample: all that the token depends on."""
        unsigned = positions.astype(np.uint64)
        first = self._first_read(positions).astype(np.uint64)
        attended = (first + _mix_array(unsigned ^ np.uint64(_ATTEND)) % (unsigned + np.uint64(1) - first)).astype(np.int64)
        row_of = np.repeat(np.arange(len(rows)), counts).tolist()
        block_of = (attended // self.block_tokens).tolist()
        blocks = np.array([rows[row].blocks[block] for row, block in zip(row_of, block_of, strict=True)], np.int64)
        if len(blocks) and blocks.min() < 0:
            raise IndexError("a row reads a block that the first group has let go of")
        seeds = np.array([row.sampling.seed & _MASK for row in rows], np.uint64)
        warm = np.array([row.sampling.temperature > 0 for row in rows])
        noise = np.repeat(np.where(warm, _mix_array(seeds), np.uint64(0)), counts)
        seen = self._hashes[blocks, attended % self.block_tokens]
        return _mix_array(hashes ^ _mix_array(seen ^ noise ^ _mix_array(unsigned + np.uint64(1))))

    def _first_read(self, positions: I64) -> I64:
        """The first position that the first group still keeps for each."""
        reads = self.rule.reads
        if reads.keeps_all:
            return np.zeros_like(positions)
        return np.array([reads.first_token(position) for position in positions.tolist()], np.int64)

    def _samples(self, rows: Sequence[StepRow], tokens: list[int], drawn: U64) -> list[RowSamples]:
        results: list[RowSamples] = []
        masks = fill_masks(rows, self.vocab_size)
        allowed = iter(()) if masks is None else (allowed_tokens(words, self.vocab_size) for words in masks.words)
        at = 0
        for row in rows:
            sampling = row.sampling
            chosen = tokens[at : at + row.num_samples]
            if chosen and sampling.stop_token_ids and (sampling.min_tokens or self.rule.mean_output_tokens):
                output_index = row.start + len(row.tokens) - row.num_samples + 1 - row.prompt_tokens
                chosen = [
                    self.rule.settle(token, int(drawn[at + i]), sampling, output_index + i) for i, token in enumerate(chosen)
                ]
            at += row.num_samples
            if masks is not None and row.is_constrained:
                chosen = [self.rule.choose_allowed(next(allowed), int(drawn[at - len(chosen) + i])) for i in range(len(chosen))]
            logprobs = None if sampling.logprobs < 0 else [self._logprobs(token, sampling.logprobs) for token in chosen]
            results.append(RowSamples(tokens=chosen, logprobs=logprobs))
        return results

    def _logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        top = (token, *(int(other) for other in self.rule.allowed[: num_top + 1] if other != token))[:num_top]
        return TokenLogprobs(logprob=_LOGPROB, top_tokens=top, top_logprobs=tuple(_LOGPROB - i for i in range(len(top))))
