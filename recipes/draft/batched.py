"""Answers many prompts together in plain torch, with the decoder that training uses.

Nothing is compiled or tuned first, so a short session at a GPU writes text from its first second on. Tokens are drawn with
the noise of their seed and position, as decode workers draw them.

    rows of similar prompt length ─► prefill, in chunks ─► decode, all rows a token a step ─► rows that ended are dropped
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.ops.sampling.sample import Draw, sample_tokens
from common.ops.sampling.sample_device import DrawBatch, sample_plain
from recipes.draft.llama import Layer, rotary_tables, rotate
from recipes.draft.target import Target

_CHECK_STEPS = 16
"""Decode steps between two looks at which rows have ended; each look waits for the device."""
_KEPT_SHARE = 0.8
"""Rows are moved together when fewer than this share of them goes on."""
_BUCKET = 64
"""Lengths of the cache that attention reads are multiples of this."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt to answer. temperature: 0 is greedy."""

    prompt: Sequence[int]
    seed: int
    temperature: float


@dataclass(slots=True)
class _Rows:
    """What decoding keeps of the rows that go on. index: of each row among the asks, on the CPU; lengths: tokens in the
    cache; longest: the largest of them or more; keys, values: [layers, rows, kv_heads, length, head_dim]."""

    index: list[int]
    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    last: torch.Tensor
    ended: torch.Tensor
    seeds: torch.Tensor
    temperatures: torch.Tensor
    longest: int

    def keep(self, kept: torch.Tensor) -> None:
        """kept: int64, indices of the rows that go on."""
        self.index = [self.index[row] for row in kept.tolist()]
        for name in ("lengths", "last", "ended", "seeds", "temperatures"):
            setattr(self, name, getattr(self, name)[kept])
        self.longest = int(self.lengths.max())
        # one after the other: a second copy of both might not fit
        self.keys = self.keys[:, kept]
        self.values = self.values[:, kept]


class BatchedWriter:
    """head: float32 of the target's, so that equal logits are as rare as in the target itself."""

    def __init__(self, target: Target, eos_ids: Collection[int]) -> None:
        self.target, self.device, self.dtype = target, target.head.device, target.head.dtype
        self.head = target.head.float()
        self.eos_ids = torch.tensor(sorted(eos_ids), device=self.device)

    def rows_that_fit(self, longest: int, cache_bytes: int) -> int:
        """Return how many rows of `longest` tokens a cache of that size holds."""
        shape = self.target.shape
        token_bytes = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * self.dtype.itemsize
        return max(1, cache_bytes // (longest * token_bytes))

    @torch.no_grad()
    def write(self, asks: Sequence[Ask], max_tokens: int, deadline_s: float = float("inf")) -> list[list[int]]:
        """Return the answers, each up to and with its first end-of-sequence id. Past `deadline_s` (of `time.monotonic`) those
        that are not finished are cut where they are."""
        rows = self._prefilled(asks, max_tokens)
        written = torch.empty(len(asks), max_tokens, dtype=torch.int64, device=self.device)
        written[:, 0] = rows.last
        counts = [1] * len(asks)
        place = torch.arange(len(asks), device=self.device)
        for step in range(1, max_tokens):
            if step % _CHECK_STEPS == 0 or step == 1:
                kept = (~rows.ended).nonzero()[:, 0]
                if not len(kept) or time.monotonic() > deadline_s:
                    break
                if len(kept) < _KEPT_SHARE * len(rows.index):
                    rows.keep(kept)
                    place = place[kept]
            self._step(rows)
            written[place, step] = rows.last
            for index in rows.index:
                counts[index] = step + 1
        stop = torch.isin(written, self.eos_ids).cpu()
        found: list[list[int]] = []
        for tokens, ends, count in zip(written.cpu().tolist(), stop, counts, strict=True):
            first = ends[:count].nonzero()
            found.append(tokens[: int(first[0]) + 1 if len(first) else count])
        return found

    def _prefilled(self, asks: Sequence[Ask], max_tokens: int, chunk_tokens: int = 65_536) -> _Rows:
        shape, count = self.target.shape, len(asks)
        longest = max(len(ask.prompt) for ask in asks)
        # attention reads whole buckets, so what is behind the tokens must be numbers
        capacity = -(-(longest + max_tokens) // _BUCKET) * _BUCKET
        size = (shape.num_hidden_layers, count, shape.num_key_value_heads, capacity, shape.head_dim)
        keys = torch.zeros(size, dtype=self.dtype, device=self.device)
        values = torch.zeros_like(keys)
        tokens = torch.zeros(count, longest, dtype=torch.int64)
        for row, ask in enumerate(asks):
            tokens[row, : len(ask.prompt)] = torch.tensor(ask.prompt)
        lengths = torch.tensor([len(ask.prompt) for ask in asks], device=self.device)
        tokens = tokens.to(self.device)
        cosines, sines = (table.to(self.dtype) for table in rotary_tables(longest, shape, self.device))
        final = torch.empty(count, shape.hidden_size, dtype=self.dtype, device=self.device)
        for begin in range(0, count, max(1, chunk_tokens // longest)):
            some = slice(begin, begin + max(1, chunk_tokens // longest))
            x = self.target.embedding[tokens[some]]
            for number, layer in enumerate(self.target.decoder.layers):
                assert isinstance(layer, Layer)
                query, key, value = layer.self_attn.projected(layer.input_layernorm(x), cosines, sines)
                keys[number, some, :, :longest], values[number, some, :, :longest] = key, value
                mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                x = x + layer.self_attn.joined(mixed)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            final[some] = x[torch.arange(len(x), device=self.device), lengths[some] - 1]
        seeds = torch.tensor([ask.seed for ask in asks], device=self.device)
        temperatures = torch.tensor([ask.temperature for ask in asks], dtype=torch.float32, device=self.device)
        ended = torch.zeros(count, dtype=torch.bool, device=self.device)
        rows = _Rows(list(range(count)), keys, values, lengths, lengths, ended, seeds, temperatures, longest)
        self._draw(rows, final)
        return rows

    def _step(self, rows: _Rows) -> None:
        """Compute the last token of each row, and draw the next."""
        shape = self.target.shape
        count, capacity = len(rows.index), (rows.longest // _BUCKET + 1) * _BUCKET
        place = torch.arange(count, device=self.device)
        cosines, sines = (table.to(self.dtype) for table in rotary_tables(capacity, shape, self.device))
        # [rows, 1, 1, head_dim]: each row is at a position of its own
        cosines, sines = cosines[rows.lengths][:, None, None], sines[rows.lengths][:, None, None]
        hidden = torch.arange(capacity, device=self.device) > rows.lengths[:, None]
        mask = torch.zeros(count, capacity, dtype=self.dtype, device=self.device).masked_fill(hidden, float("-inf"))
        mask = mask[:, None, None]
        mask = mask.expand(-1, -1, shape.num_attention_heads // shape.num_key_value_heads, -1)
        x = self.target.embedding[rows.last]
        # others take no mask, or plan anew for each length
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            for number, layer in enumerate(self.target.decoder.layers):
                assert isinstance(layer, Layer)
                attention = layer.self_attn
                normed = layer.input_layernorm(x)
                query = rotate(attention.q_proj(normed).view(count, -1, 1, shape.head_dim), cosines, sines)
                key = rotate(attention.k_proj(normed).view(count, -1, 1, shape.head_dim), cosines, sines)
                keys, values = rows.keys[number][:, :, :capacity], rows.values[number][:, :, :capacity]
                keys[place, :, rows.lengths] = key[:, :, 0]
                values[place, :, rows.lengths] = attention.v_proj(normed).view(count, -1, shape.head_dim)
                # the query heads that share a KV head are its queries
                grouped = query.view(count, shape.num_key_value_heads, -1, shape.head_dim)
                mixed = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
                x = x + attention.o_proj(mixed.reshape(count, -1))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        rows.longest += 1
        rows.lengths = rows.lengths + 1
        self._draw(rows, x)

    def _draw(self, rows: _Rows, final: torch.Tensor) -> None:
        """final: [rows, hidden], what the last layer leaves at the last known token."""
        logits = self.target.decoder.norm(final).float() @ self.head.T
        if logits.is_cuda:
            batch = DrawBatch.create(len(logits), self.device)
            batch.seed.copy_(rows.seeds)
            batch.position.copy_(rows.lengths)
            batch.temperature.copy_(rows.temperatures)
            batch.top_p.fill_(1.0)
            batch.log_min_p.fill_(float("-inf"))
            rows.last = torch.empty(len(logits), dtype=torch.int64, device=self.device)
            sample_plain(logits, batch, rows.last)
        else:
            of_rows = zip(rows.temperatures.tolist(), rows.seeds.tolist(), rows.lengths.tolist(), strict=True)
            draws = [Draw(temperature, 0, 1.0, 0.0, seed, position) for temperature, seed, position in of_rows]
            rows.last = torch.tensor(sample_tokens(logits, draws))
        rows.ended = rows.ended | torch.isin(rows.last, self.eos_ids)
