"""Runs steps with 8-bit weights on a CPU: each is one compiled call, in several threads; see `ops.cpu_int8.forward_numba`.

Helpers are asked for every step and may come late: the thread that runs the step does whatever they leave, and does not wait
for them to begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.cpu.runner import CpuRunner
from common.engine.layer_group import LayerGroup
from common.engine.plan import StepRow
from common.models.decoder import Decoder
from common.models.reduced_vocabulary import spread
from common.ops.cpu_int8.attention_numba import Step
from common.ops.cpu_int8.forward_numba import Room, Weights, counters_for, forward
from common.ops.cpu_int8.team_cpu import together
from common.ops.cpu_int8.weights import LANES, PAIRS, linears_of
from common.ops.norm.rms_norm import rms_norm
from common.protocol.errors import ConfigError

_KEPT_LOGITS = 64
"""After a step that scored a prompt, memory for more rows of logits than this is given back."""

_NO_LAYERS = np.empty(0, np.int64)


class Int8Runner(CpuRunner):
    """The pool is bfloat16."""

    def __init__(self, decoder: Decoder, groups: Sequence[LayerGroup], *, fingerprint: str, threads: int) -> None:
        """:raises ConfigError: if the layers keep KV in several pools, of which this engine reads one."""
        if len(groups) > 1:
            raise ConfigError("8-bit weights on a CPU need layers of equal retention: use --dtype float32", param="dtype")
        super().__init__(decoder, groups, torch.bfloat16, fingerprint=fingerprint, threads=threads)
        config = decoder.config
        self._weights = _weights(decoder)
        self._forward = forward(config.head_dim, config.num_heads // config.num_kv_heads)
        self._rope = _rope_table(decoder, min(config.max_context, self.num_blocks * self.block_tokens))
        self._rotated = np.array([layer.mixer.rope is not None for layer in config.layers])
        self._pool_bits = groups[0].pool.view(torch.int16).numpy()
        self._room = self._new_room(1)
        self._logits = self._new_logits(1)
        self._first_read = self._num_kept = 0
        self._has_scored = False
        self._noted = np.empty((0, 0), np.float32)
        self._firsts: list[int] = []

    def logits(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Samples come first, then positions with targets, then those that are only added up and need no logits."""
        order = sorted(range(len(rows)), key=lambda at: 0 if not rows[at].num_read else 1 if rows[at].targets else 2)
        rows = [rows[at] for at in order]
        counts = np.array([len(row.tokens) for row in rows])
        ends = np.cumsum(counts)
        num_tokens = int(ends[-1])
        every = np.arange(num_tokens)
        held = np.array([len(row.blocks) for row in rows])
        where = Step(
            positions=every + np.repeat(np.array([row.start for row in rows]) - ends + counts, counts),
            rows=np.repeat(np.arange(len(rows)), counts),
            blocks=np.fromiter((block for row in rows for block in row.blocks), np.int64, int(held.sum())),
            block_starts=np.cumsum(held) - held,
            pool=self._pool_bits,
            rope=self._rope,
            rotated=self._rotated,
        )
        tokens = np.fromiter((token for row in rows for token in row.tokens), np.int64, num_tokens)
        wanted = np.array([row.num_samples or row.num_read for row in rows])
        num_logits = sum(row.num_samples or len(row.targets) for row in rows)
        samples = every[np.repeat(counts - wanted, counts) <= every - np.repeat(ends - counts, counts)]
        if num_tokens > len(self._room.residual):
            self._room = self._new_room(num_tokens)
        shrinks = self._has_scored and num_logits <= _KEPT_LOGITS < len(self._logits)
        if num_logits > len(self._logits) or shrinks:
            self._logits = self._new_logits(num_logits)
        self._has_scored = any(row.targets for row in rows)
        self._first_read, self._num_kept = sum(row.num_samples for row in rows), len(samples)
        if self.head is not None:
            self._firsts = (ends - counts)[np.argsort(order)].tolist()
            if num_tokens > len(self._noted):
                self._noted = np.empty((num_tokens, self.head.state_size), np.float32)
        self._run(where, num_logits, tokens, every, samples)
        return self._whole(0, self._first_read)

    def read_states(self) -> torch.Tensor:
        residual = torch.from_numpy(self._room.residual[self._first_read : self._num_kept])
        return rms_norm(residual, self.decoder.norm, self.decoder.config.rms_eps)

    def read_logits(self, start: int, end: int) -> torch.Tensor:
        return self._whole(self._first_read + start, self._first_read + end)

    def _whole(self, start: int, end: int) -> torch.Tensor:
        """Logits [start, end) of the step, of all tokens."""
        config = self.decoder.config
        logits = torch.from_numpy(self._logits[start:end, : config.head_size])
        return logits if self.decoder.target_ids is None else spread(logits, self.decoder.target_ids, config.vocab_size)

    def noted_states(self, rows: Sequence[StepRow]) -> tuple[NDArray[np.float32], Sequence[int]]:
        return self._noted, self._firsts

    def _run(self, where: Step, num_logits: int, *tokens: NDArray[np.int64]) -> None:
        counters = counters_for(self.decoder.config.num_layers)
        layers = _NO_LAYERS if self.head is None else self.head.layers
        step: tuple[Any, ...] = (counters, self.threads, self._weights, where, *tokens, num_logits, self._room, self._logits)
        step += (layers, self._noted)
        together(self.threads, self._forward, *step)

    def _new_room(self, rows: int) -> Room:
        config = self.decoder.config
        attended = config.num_heads * config.head_dim
        widest = max(attended + 2 * config.num_kv_heads * config.head_dim, 2 * config.intermediate_size)
        pairs = max(_padded(size, 2 * PAIRS) // 2 for size in (config.hidden_size, attended, config.intermediate_size))
        return Room(
            residual=np.empty((rows, config.hidden_size), np.float32),
            narrow=np.empty((rows, _padded(max(config.hidden_size, attended), LANES)), np.float32),
            wide=np.empty((rows, _padded(widest, LANES)), np.float32),
            data=np.empty(rows * pairs, np.int32),
            row_scale=np.empty(rows, np.float32),
        )

    def _new_logits(self, samples: int) -> NDArray[np.float32]:
        return np.empty((samples, _padded(self.decoder.config.head_size, LANES)), np.float32)


def _rope_table(decoder: Decoder, positions: int) -> NDArray[np.float32]:
    """As `Step.rope` says: the last row is an angle of 0."""
    table = decoder.rope.table(positions).numpy()
    none = np.concatenate((np.ones(table.shape[1] // 2), np.zeros(table.shape[1] // 2)))
    return np.concatenate((table, none[None].astype(np.float32)))


def _weights(decoder: Decoder) -> Weights:
    packed = [weight.int8 for _, weight in decoder.linears if weight.int8 is not None]
    assert len(packed) == 4 * len(decoder.layers) + 1
    nothing = torch.empty(0)
    layers = decoder.layers
    return Weights(
        linears=linears_of(packed),
        embedding=decoder.embedding.numpy(),
        input_norms=_rows([layer.input_norm for layer in layers]),
        q_norms=_rows([nothing if layer.q_norm is None else layer.q_norm for layer in layers]),
        k_norms=_rows([nothing if layer.k_norm is None else layer.k_norm for layer in layers]),
        mlp_norms=_rows([layer.mlp_norm for layer in layers]),
        norm=decoder.norm.numpy(),
        eps=decoder.config.rms_eps,
        heads=decoder.config.num_heads,
        middle=decoder.config.intermediate_size,
    )


def _rows(norms: Sequence[torch.Tensor]) -> NDArray[np.float32]:
    return torch.stack(list(norms)).numpy()


def _padded(size: int, to: int) -> int:
    return size + -size % to
