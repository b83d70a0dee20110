"""Runs steps with torch: flattens a ragged batch for the decoder's forward pass.

Tokens of a step are laid out with the one-token rows (decoding) first, longest context first, so that attention can take
them as one slice; then every other row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.cpu.runner import CpuRunner
from common.engine.layer_group import GroupedAttention, LayerGroup
from common.engine.plan import StepRow
from common.engine.reading import order_of_reading
from common.models.attention import CpuAttention
from common.models.decoder import Decoder, Inputs
from common.ops.attention.paged_attention import AttentionRow, NotInvariant, Scratch, check_attention, plan_attention
from common.ops.kv.paged_kv import SlotMapping, clear_tails
from common.protocol.errors import ConfigError


class TorchRunner(CpuRunner):
    """For weights in a float format; the pool's dtype is theirs."""

    def __init__(self, decoder: Decoder, groups: Sequence[LayerGroup], *, fingerprint: str, threads: int) -> None:
        """:raises ConfigError: if this CPU's attention kernel makes answers depend on the batch."""
        super().__init__(decoder, groups, decoder.dtype, fingerprint=fingerprint, threads=threads)
        try:
            check_attention(decoder.config.head_dim, self.block_tokens, threads)
        except NotInvariant as error:
            raise ConfigError(f"{error}; use --dtype auto with the package numba: 8-bit weights", param="dtype") from error
        self._scratches = [Scratch() for _ in groups]
        self._read = torch.empty(0)
        self._noted: dict[int, torch.Tensor] = {}
        self._firsts: list[int] = []

    def logits(self, rows: Sequence[StepRow]) -> torch.Tensor:
        inputs = self._inputs(rows)
        if self.head is not None:
            inputs.noted = self._noted = dict.fromkeys(self.head.layers.tolist(), torch.empty(0))
        states = self.decoder.states(inputs)
        num_samples = sum(row.num_samples for row in rows)
        self._read = states[num_samples:]
        return self.decoder.logits(states[:num_samples])

    def read_states(self) -> torch.Tensor:
        return self._read.float()

    def read_logits(self, start: int, end: int) -> torch.Tensor:
        return self.decoder.logits(self._read[start:end])

    def noted_states(self, rows: Sequence[StepRow]) -> tuple[NDArray[np.float32], Sequence[int]]:
        return torch.cat(list(self._noted.values()), -1).float().numpy(), self._firsts

    def _inputs(self, rows: Sequence[StepRow]) -> Inputs:
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i].tokens) > 1, -rows[i].start))
        counts = np.array([len(rows[i].tokens) for i in order])
        starts = np.array([rows[i].start for i in order])
        firsts = np.cumsum(counts) - counts
        num_tokens = int(counts.sum())
        positions = np.repeat(starts - firsts, counts) + np.arange(num_tokens)
        tokens = np.fromiter((token for i in order for token in rows[i].tokens), np.int64, num_tokens)

        first_of = dict(zip(order, firsts.tolist(), strict=True))
        self._firsts = [first_of[i] for i in range(len(rows))]
        ends = [first_of[i] + len(row.tokens) for i, row in enumerate(rows)]
        samples = [place for end, row in zip(ends, rows, strict=True) for place in range(end - row.num_samples, end)]
        samples += [place for i in order_of_reading(rows) for place in range(ends[i] - rows[i].num_read, ends[i])]
        where, highest = torch.from_numpy(positions), int(positions.max())
        rotations = {rope: table.rows(where, highest) for rope, table in self.decoder.ropes.items()}
        config = self.decoder.config
        attentions: list[CpuAttention] = []
        for index, (group, scratch) in enumerate(zip(self.groups, self._scratches, strict=True)):
            pool = group.pool
            tables = [row.more_blocks[index - 1] if index else row.blocks for row in rows]
            clear_tails(pool, [tail for row, table in zip(rows, tables, strict=True) if (tail := self._new_tail(row, table))])
            blocks = np.concatenate([self._blocks_of(rows[i], tables[i]) for i in order])
            placed = [
                AttentionRow(first_of[i], len(rows[i].tokens), rows[i].start, group.whole_table(rows[i], tables[i]))
                for i in order
            ]
            plan = plan_attention(pool, config.num_heads, placed, num_tokens, scratch)
            slots = SlotMapping(pool, blocks, positions % self.block_tokens)
            attentions.append(CpuAttention(pool, plan, slots, where, rotations))
        attention = attentions[0] if len(attentions) == 1 else GroupedAttention(self.groups, attentions)
        return Inputs(
            tokens=torch.from_numpy(tokens),
            samples=torch.tensor(samples, dtype=torch.int64),
            attention=attention,
        )

    def _blocks_of(self, row: StepRow, table: Sequence[int]) -> np.ndarray:
        """The block of each of the row's tokens, int64 [tokens]."""
        if len(row.tokens) == 1:
            return np.array([table[row.start // self.block_tokens]], np.int64)
        indices = np.arange(row.start, row.start + len(row.tokens)) // self.block_tokens
        return np.asarray(table, np.int64)[indices]

    def _new_tail(self, row: StepRow, table: Sequence[int]) -> tuple[int, int] | None:
        """(block, offset) of what this step leaves unwritten in a block that it enters."""
        end = row.start + len(row.tokens)
        offset = end % self.block_tokens
        if offset == 0 or end - offset < row.start:
            return None
        return table[end // self.block_tokens], offset
