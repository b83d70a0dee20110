"""Runs step plans on a decoder: flattens a ragged batch, computes it, samples.

Tokens of a step are laid out with the one-token rows (decoding) first, longest context first, so that attention can take
them as one slice; then every other row. The flat batch is padded to one of few sizes, because oneDNN compiles a matrix
kernel for each size that it meets; 8-bit weights need no padding, and their rows are shared out among threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

from common.engine.plan import LaterStep, StepPlan, StepResult, StepRow, resolve_feeds
from common.engine.sampling import penalised, sample_rows
from common.models.attention import CpuAttention, FusedCpuAttention
from common.models.decoder import Decoder, Inputs
from common.ops.paged_attention import AttentionRow, Scratch, plan_attention
from common.ops.paged_kv import SlotMapping, clear_tails
from common.protocol.errors import ConfigError, InvalidParameter

_ROWS_PER_THREAD = 4
"""With fewer, reading the weights once more costs more than a second thread gains."""


class TorchRunner:
    """`plan.Runner` over a decoder.

    pool: [num_blocks, layers, 2, block_tokens, kv_heads, head_dim], contiguous, in the decoder's dtype; bfloat16 for 8-bit
    weights.

    :raises ConfigError: if the pool's shape or dtype is not the model's.
    """

    run_ahead = 1

    def __init__(self, decoder: Decoder, pool: torch.Tensor, *, fingerprint: str, threads: int) -> None:
        config = decoder.config
        if (
            pool.ndim != 6
            or pool.shape[1:3] != (config.num_layers, 2)
            or pool.shape[4:] != (config.num_kv_heads, config.head_dim)
        ):
            raise ConfigError(f"a KV pool of shape {list(pool.shape)} does not fit this model")
        fused = decoder.layers[0].qkv.format == "int8"
        if pool.dtype != (torch.bfloat16 if fused else decoder.dtype):
            raise ConfigError(f"a {pool.dtype} KV pool does not fit a {decoder.dtype} model")
        self.decoder = decoder
        self.pool = pool
        self.num_blocks, self.block_tokens = pool.shape[0], pool.shape[3]
        self.max_context = config.max_context
        self.vocab_size = config.vocab_size
        self.fingerprint = fingerprint
        self._threads = threads
        self._scratch = Scratch()
        self._prepared = threading.local()
        self._row_threads = ThreadPoolExecutor(threads, thread_name_prefix="rows")
        self._sampled: list[int] = []
        self._rope = decoder.rope.table(config.max_context).numpy() if fused else None
        self._pool_bits = pool.view(torch.int16).numpy() if fused else np.empty(0, np.int16)

    def execute(self, plan: StepPlan) -> StepResult:
        """:raises InvalidParameter: if a row can't be run; nothing has been written then."""
        begun = time.perf_counter()
        self._prepare_thread()
        if not plan.rows:
            return StepResult(rows=[])
        resolve_feeds(plan, self._sampled)
        for row in plan.rows:
            self._check(row)
        logits = self._logits(plan.rows).float()
        with torch.inference_mode():
            samples = sample_rows(logits, plan.rows)
        self._sampled = [token for row in samples for token in row.tokens]
        return StepResult(rows=samples, elapsed_s=time.perf_counter() - begun)

    def _logits(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """[samples, vocab_size]. The 8-bit kernels use one thread each and give a row the same bits in any company, so several
        threads take a share of the rows each."""
        shares = min(self._threads, len(rows) // _ROWS_PER_THREAD) if self._rope is not None else 1
        if shares < 2:
            return self.decoder.forward(self._inputs(rows))
        bounds = [len(rows) * share // shares for share in range(shares + 1)]
        parts = [rows[begin:end] for begin, end in pairwise(bounds)]
        return torch.cat(list(self._row_threads.map(lambda part: self.decoder.forward(self._inputs(part)), parts)))

    def submit(self, plan: StepPlan) -> LaterStep:
        return LaterStep(self, plan)

    def _prepare_thread(self) -> None:
        """The number of threads is a property of each calling thread in OpenMP, not of the process."""
        if not getattr(self._prepared, "done", False):
            torch.set_num_threads(self._threads)
            self._prepared.done = True

    def _check(self, row: StepRow) -> None:
        end = row.start + len(row.tokens)
        if not row.tokens or row.start < 0 or not 0 <= row.num_samples <= len(row.tokens):
            raise InvalidParameter(f"a row of {len(row.tokens)} tokens can't give {row.num_samples} samples")
        if len(row.blocks) * self.block_tokens < end:
            raise InvalidParameter(f"{len(row.blocks)} blocks of {self.block_tokens} tokens don't hold {end} tokens")
        if min(row.blocks) < 0 or max(row.blocks) >= self.num_blocks:
            raise InvalidParameter(f"a row names a block outside the pool of {self.num_blocks}")
        if min(row.tokens) < 0 or max(row.tokens) >= self.vocab_size:
            raise InvalidParameter(f"a token id is outside the vocabulary of {self.vocab_size}")
        if row.num_samples and penalised(row.sampling) and len(row.history) < end:
            raise InvalidParameter(f"penalties need the row's {end} tokens as history, not {len(row.history)}")

    def _inputs(self, rows: Sequence[StepRow]) -> Inputs:
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i].tokens) > 1, -rows[i].start))
        counts = np.array([len(rows[i].tokens) for i in order])
        starts = np.array([rows[i].start for i in order])
        firsts = np.cumsum(counts) - counts
        num_tokens = int(counts.sum())
        positions = np.repeat(starts - firsts, counts) + np.arange(num_tokens)
        tokens = np.fromiter((token for i in order for token in rows[i].tokens), np.int64, num_tokens)
        padding = 0 if self._rope is not None else padded_size(num_tokens) - num_tokens

        first_of = dict(zip(order, firsts.tolist(), strict=True))
        samples = [
            first_of[i] + len(row.tokens) - row.num_samples + j for i, row in enumerate(rows) for j in range(row.num_samples)
        ]
        if self._rope is not None:
            attention = self._fused([rows[i] for i in order], positions, counts)
        else:
            clear_tails(self.pool, [tail for row in rows if (tail := self._new_tail(row))])
            placed = [AttentionRow(first_of[i], len(rows[i].tokens), rows[i].start, rows[i].blocks) for i in order]
            blocks = np.concatenate([self._blocks_of(rows[i]) for i in order])
            attention = self._plain(placed, blocks, np.pad(positions, (0, padding), mode="edge"))
        return Inputs(
            tokens=torch.from_numpy(np.pad(tokens, (0, padding), mode="edge")),
            samples=torch.tensor(samples, dtype=torch.int64),
            attention=attention,
        )

    def _plain(self, rows: Sequence[AttentionRow], blocks: np.ndarray, padded: np.ndarray) -> CpuAttention:
        """blocks: int64 [tokens], the block of each; padded: int64, positions with padding behind."""
        config = self.decoder.config
        cos, sin = self.decoder.rope.rows(torch.from_numpy(padded), int(padded.max()))
        offsets = padded[: len(blocks)] % self.block_tokens
        plan = plan_attention(self.pool, config.num_heads, rows, len(padded), self._scratch)
        return CpuAttention(config, self.pool, plan, SlotMapping(self.pool, blocks, offsets), cos, sin)

    def _fused(self, rows: Sequence[StepRow], positions: np.ndarray, counts: np.ndarray) -> FusedCpuAttention:
        assert self._rope is not None
        held = [len(row.blocks) for row in rows]
        return FusedCpuAttention(
            self.decoder.config,
            self._pool_bits,
            self._rope,
            positions=positions,
            rows=np.repeat(np.arange(len(rows)), counts),
            blocks=np.fromiter((block for row in rows for block in row.blocks), np.int64, sum(held)),
            block_starts=np.cumsum([0, *held[:-1]]),
        )

    def _blocks_of(self, row: StepRow) -> np.ndarray:
        """The block of each of the row's tokens, int64 [tokens]."""
        if len(row.tokens) == 1:
            return np.array([row.blocks[row.start // self.block_tokens]], np.int64)
        indices = np.arange(row.start, row.start + len(row.tokens)) // self.block_tokens
        return np.asarray(row.blocks, np.int64)[indices]

    def _new_tail(self, row: StepRow) -> tuple[int, int] | None:
        """(block, offset) of what this step leaves unwritten in a block that it enters."""
        end = row.start + len(row.tokens)
        offset = end % self.block_tokens
        if offset == 0 or end - offset < row.start:
            return None
        return row.blocks[end // self.block_tokens], offset


def padded_size(num_tokens: int) -> int:
    """The next size with at most five significant bits: exact up to 32, at most 6 % more above. One token becomes two, as
    every linear would make of it (see `ops.linear`)."""
    step = 1 << max(0, (num_tokens - 1).bit_length() - 5)
    return max(2, -(-num_tokens // step) * step)
