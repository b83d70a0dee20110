"""Sampling on a GPU, around a step's graph: draws go in before it, and what few rows ask for runs after it.

Every row is drawn in the graph, as if it had no filters. Rows with top-k or top-p, penalties, biases, minimum lengths or masks
are drawn again behind it, and log-probabilities are taken last; see `engine.sampling` for the order, which is the same. What is
done behind the graph is packed while the device computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.gpu.counts import NO_SLOT, PenaltyCounts, PlannedCounts
from common.engine.gpu.logprobs import LogprobLaunches, Logprobs
from common.engine.gpu.pinned import to_device
from common.engine.masks import StepMasks
from common.engine.plan import Constraint, Masks, StepRow
from common.engine.sampling import asks_alike, forbidden_tokens, penalised
from common.ops.sampling.adjust_device import apply_adjustments
from common.ops.sampling.adjustments import ANEW, Adjustment, Adjustments, HostAdjustments, pack_adjustments
from common.ops.sampling.gumbel import GREEDY_BELOW
from common.ops.sampling.sample import Draw
from common.ops.sampling.sample_device import DrawBatch, HostDraws, pack_draws, sample_filtered, sample_plain
from common.protocol.messages import SamplingParams


class _Extras(NamedTuple):
    """What a step needs behind its graph. Lists are of samples.

    filtered: drawn again with top-k or top-p, int32 on the device. masked: drawn again under a mask, without filters or
    adjustments; mask_of: which of the step's masks is each one's. adjustments: drawn again from adjusted copies, under masks
    too if `masks_adjusted`, and with filters if `filters_adjusted`. asking: those whose log-probabilities are taken; num_top:
    of those, the most.
    """

    filtered: torch.Tensor | None
    masked: NDArray[np.int32]
    mask_of: NDArray[np.int32]
    adjustments: HostAdjustments | None
    masks_adjusted: bool
    filters_adjusted: bool
    asking: NDArray[np.int32]
    num_top: int


_Key = tuple[tuple[int, ...], bytes]
_MOST_KNOWN = 128
"""Kinds of steps of which it is kept what they need."""


class DeviceSampler:
    """`sampled`: int64 [max_samples], the tokens of the last step, on the device. `results`: the same, but `NO_TOKEN` where
    logits were not finite.

    `depth` steps may be under way at once: so many sets of pinned draws are used in turn.
    """

    def __init__(self, max_samples: int, device: torch.device, depth: int, *, max_penalised: int = 256) -> None:
        """max_penalised: sequences whose counts are kept from step to step at most, within `counts.MAX_BYTES`."""
        self.draws = DrawBatch.create(max_samples, device)
        self.sampled = torch.zeros(max_samples, dtype=torch.int64, device=device)
        self.results = torch.zeros_like(self.sampled)
        self._previous = torch.zeros_like(self.sampled)
        self._hosts = [HostDraws(max_samples) for _ in range(depth)]
        self._masks = [torch.empty(0, 0, dtype=torch.int32) for _ in range(depth)]
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._counts = PenaltyCounts(max_penalised, device)
        self._turn = 0
        self._packed: list[SamplingParams] = []
        self._repeated: _Extras | None = None
        """Of the step before, if this one asks for the same."""
        self._known: dict[_Key, _Extras] = {}
        """Of steps without adjustments and masks, by the log-probabilities that each sample asks for and which samples have
        filters."""
        self._logprobs = LogprobLaunches(self.sampled, depth)
        self._warm = self._special = False

    def load(self, rows: Sequence[StepRow]) -> bool:
        """Before the graph: how each sample is drawn, on its way to the device. Returns whether `finish` has work."""
        before, host = self._hosts[self._turn], self._hosts[(self._turn + 1) % len(self._hosts)]
        self._turn = (self._turn + 1) % len(self._hosts)
        params = [row.sampling for row in rows for _ in range(row.num_samples)]
        positions = [
            position
            for row in rows
            for position in range(row.start + len(row.tokens) - row.num_samples + 1, row.start + len(row.tokens) + 1)
        ]  # of the tokens drawn
        if len(params) == len(self._packed) and all(map(_same, params, self._packed)):
            host.copy_from(before)
            host.position[: len(positions)] = positions
        elif len(params) <= host.rows and all(p.temperature < GREEDY_BELOW for p in params):
            host.temperature[:] = host.first_temperature[:] = 0  # of greedy rows nothing else is read
            self._repeated = None
            self._packed = params
        else:
            drawn = zip(params, positions, strict=True)
            self._repeated = None
            self._packed = []  # if packing fails, nothing may be copied from what it leaves
            pack_draws([Draw(p.temperature, p.top_k, p.top_p, p.min_p, p.seed, at) for p, at in drawn], host)
            again = [one is not None or penalised(p) for one, p in zip(_constraints(rows), params, strict=True)]
            host.first_temperature[: len(params)][again] = 0
            self._packed = params
        warm = bool(host.temperature[: len(params)].any())
        if warm or self._warm:  # greedy rows are drawn alike wherever they are
            self.draws.load(host)
        self._warm = warm
        sampled = [row.sampling for row in rows if row.num_samples]
        if any(map(penalised, sampled)):
            self._previous.copy_(self.sampled)
        self._special = any(map(_is_special, sampled)) or any(row.is_constrained for row in rows)
        return self._special

    def load_again(self, rows: Sequence[StepRow]) -> bool:
        """Call it instead of `load` for rows of one sample each, whose positions the device advances itself. They are loaded
        only if they are drawn otherwise than those of the step before.

        Returns whether `finish` has work.
        """
        same = len(rows) == len(self._packed) and all(
            row.sampling is before for row, before in zip(rows, self._packed, strict=True)
        )
        if same and not (self._special and self._repeated is None):
            return self._special
        return self.load(rows)

    def mask_buffer(self, count: int, words: int) -> Masks:
        """After `load`: pinned memory for this step's masks, int32 [count, words]."""
        buffer = self._masks[self._turn]
        if buffer.shape[0] < count or buffer.shape[1] != words:
            buffer = torch.empty(count, words, dtype=torch.int32, pin_memory=self.sampled.is_cuda)
            self._masks[self._turn] = buffer
        return buffer[:count].numpy()

    def draw(self, logits: torch.Tensor) -> None:
        """In the graph. logits: [samples, vocab_size]; `sampled` gets a token for each."""
        sample_plain(logits, self.draws, self.sampled, first=True, results=self.results)

    def finish(self, logits: torch.Tensor, rows: Sequence[StepRow], masks: Callable[[], StepMasks | None]) -> Logprobs | None:
        """Behind the graph: the rows that asked for more than it does. masks: of the step's constrained samples, in a
        `mask_buffer`; called last, since it may wait for the step before."""
        device = self.sampled.device
        extras, constrained = self._repeated, any(row.is_constrained for row in rows)
        if extras is None or constrained:
            key = None if constrained else self._key()
            extras = None if key is None else self._known.get(key)
            if extras is None:
                planned = self._counts.plan(rows, logits.shape[1])
                extras = _extras(rows, self._hosts[self._turn], planned, device)
                self._counts.count(planned, self._previous)
                if key is not None:
                    if len(self._known) == _MOST_KNOWN:
                        self._known.clear()
                    self._known[key] = extras
            self._repeated = None if key is None else extras
        adjustments = None if extras.adjustments is None else Adjustments.on(device, extras.adjustments)
        if extras.filtered is not None:
            sample_filtered(logits, extras.filtered, self.draws, self.sampled, results=self.results)
        again = to_device(extras.masked, device) if len(extras.masked) else None
        found = masks()
        words = None if found is None else self._on_device(found)
        if again is not None:
            assert words is not None
            own = words if len(words) == len(again) else words.index_select(0, to_device(extras.mask_of, device))
            sample_plain(logits, self.draws, self.sampled, rows=again, masks=own, results=self.results)
        if adjustments is not None:
            allowed = words if extras.masks_adjusted else None
            adjusted = apply_adjustments(logits, adjustments, self._previous, allowed, self._counts.table)
            rows_again, into = adjustments.rows, self.results
            if extras.filters_adjusted:
                sample_filtered(adjusted, rows_again, self.draws, self.sampled, compact=True, results=into)
            else:
                sample_plain(adjusted, self.draws, self.sampled, rows=rows_again, compact=True, results=into)
        return self._logprobs.launch(logits, extras.asking, extras.num_top) if len(extras.asking) else None

    def _key(self) -> _Key | None:
        """Return what decides what the samples that were loaded need; None where their tokens so far do, too."""
        if not all(map(asks_alike, self._packed)):
            return None
        filtered = self._hosts[self._turn].filtered_rows(len(self._packed))
        return tuple([one.logprobs for one in self._packed]), filtered.tobytes()

    def _on_device(self, masks: StepMasks) -> torch.Tensor:
        """A copy beside the forward pass, which the step's stream waits for."""
        words = torch.from_numpy(masks.words)
        if self._copies is None:
            return words
        stream = torch.cuda.current_stream()
        with torch.cuda.stream(self._copies):
            copy = words.to(self.sampled.device, non_blocking=True)
        stream.wait_stream(self._copies)
        copy.record_stream(stream)
        return copy


def _constraints(rows: Sequence[StepRow]) -> list[Constraint | None]:
    """Of each sample."""
    return [row.constraint for row in rows for _ in range(row.num_samples)]


def _same(one: SamplingParams, other: SamplingParams) -> bool:
    return one is other


def _is_special(params: SamplingParams) -> bool:
    return (
        params.top_k > 0
        or params.top_p < 1
        or params.logprobs >= 0
        or bool(params.logit_bias)
        or params.min_tokens > 0
        or penalised(params)
    )


def _extras(rows: Sequence[StepRow], host: HostDraws, counts: PlannedCounts, device: torch.device) -> _Extras:
    adjustments: list[Adjustment] = []
    masked: list[int] = []
    mask_of: list[int] = []
    asking: list[int] = []
    num_top = 0
    index = num_masks = 0
    filtered = set(host.filtered_rows(sum(row.num_samples for row in rows)).tolist())
    for row, slot in zip(rows, counts.slots, strict=True):
        params = row.sampling
        for sample in range(row.num_samples):
            end = row.start + len(row.tokens) - row.num_samples + sample + 1
            forbidden = forbidden_tokens(row, end - row.prompt_tokens)
            mask = -1 if row.constraint is None else num_masks
            num_masks += mask >= 0
            if penalised(params) or params.logit_bias or forbidden or (mask >= 0 and index in filtered):
                adjustments.append(_adjustment(row, index, end, forbidden, mask, slot))
            elif mask >= 0:
                masked.append(index)
                mask_of.append(mask)
            if params.logprobs >= 0:
                asking.append(index)
                num_top = max(num_top, params.logprobs)
            index += 1
    adjusted = {one.row for one in adjustments}
    plainly = np.array(sorted(filtered - adjusted), np.int32)
    return _Extras(
        filtered=to_device(plainly, device) if len(plainly) else None,
        masked=np.array(masked, np.int32),
        mask_of=np.array(mask_of, np.int32),
        adjustments=pack_adjustments(adjustments) if adjustments else None,
        masks_adjusted=any(one.mask >= 0 for one in adjustments),
        filters_adjusted=not filtered.isdisjoint(adjusted),
        asking=np.array(asking, np.int32),
        num_top=num_top,
    )


def _adjustment(row: StepRow, index: int, end: int, forbidden: Sequence[int], mask: int, slot: int) -> Adjustment:
    params = row.sampling
    prompt: Sequence[int] = []
    output: Sequence[int] = []
    if slot != NO_SLOT:
        output = row.history[row.start + len(row.tokens) - row.num_samples + 1 : end]
    elif penalised(params):
        prompt, output = row.history[: row.prompt_tokens], row.history[row.prompt_tokens : end]
    return Adjustment(
        row=index,
        prompt=prompt,
        output=output,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        biases=params.logit_bias,
        forbidden=forbidden,
        feed=max(row.feed, 0),
        mask=mask,
        slot=ANEW if slot == NO_SLOT else slot,
    )
