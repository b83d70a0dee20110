"""Lookup in a step's own stream: the texts of running sequences stay on the GPU, and steps verify what is found there.

    plan (host)      slots for the rows' texts, and what of them the device lacks
    launch (device)  behind `settle_open_rows`: texts grow by what the step ahead gave, are searched, and what is found is
                     written into this step's tokens (`ops/lookup/follow.py`); a report is copied back with the samples

A text has a slot under its sequence's key, and keeps it from step to step. As a rule a row is fed by the step just before, in
which its text was followed, too: then the device has all that the host knows, and nothing is sent. Otherwise the host sends the
tokens since its text was last followed, of which the device skips what it sampled itself. A text is sent whole when its
sequence is new here, has gone back because a step failed, or was idle for so long that another took its slot. Long ones are
sent in parts, and searched once they are complete. Nobody says when a sequence has ended: slots used longest ago give way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.engine.gpu.board import DEVICE_SLOTS
from common.engine.gpu.pinned import to_device
from common.engine.gpu.step_buffers import PackedStep
from common.engine.plan import LookedUp, RowSamples, StepRow
from common.ops.lookup.device_texts import MAX_PROPOSAL, REPORT_HEADER, REPORT_WORDS, FollowedStep, capacity_within, new_texts
from common.ops.lookup.follow import NO_SEARCH, FollowedRow, follow_rows, pack_rows
from common.ops.sampling.open_row_inputs import StepInputs
from common.protocol.errors import ConfigError, InvalidParameter

MAX_BYTES = 64 << 20
"""Of all texts: 16,384 tokens of each of 256."""
PART_TOKENS = 2048
"""Of a text that are sent with one step. A program links them, 32 at once, before the step computes anything."""
STEP_TOKENS = 1 << 14
"""Of all texts that are sent with one step."""
_REPORTED = 8
"""Tokens behind a match that the host is told of, or as many as rows verify."""


_NOTHING = LookedUp(0, 0, 0, 0, [])


@dataclass(slots=True)
class _Slot:
    """base: the token of the sequence that is the text's first. known: tokens of the sequence that the text has at least. step:
    the number of the last step that its text was in; is_followed: it was searched then; is_fed: it also grew by samples that
    the host did not know; is_verified: and there was room for a proposal."""

    index: int
    base: int = 0
    known: int = -1
    step: int = -1
    is_followed: bool = False
    is_fed: bool = False
    is_verified: bool = False


class PlannedLookup(NamedTuple):
    """Of one step. followed: its rows with a text. searched: for each of these, its index in the step, or -1 if its text is
    only extended. verified_slots: by row, the slot of what the step ahead verifies, where the device looked that up."""

    followed: list[FollowedRow]
    searched: list[int]
    verified_slots: dict[int, int]


class LookupReport(NamedTuple):
    """searched: rows of the step, by the report's. words: int32 [rows, REPORT_WORDS], pinned; written once the step has run.
    num_tokens: of a report that the host is told of."""

    searched: list[int]
    words: torch.Tensor
    num_tokens: int

    def put_into(self, rows: Sequence[RowSamples]) -> None:
        """Tell each searched row what was found. The step has run."""
        found = self.words.numpy()[:, : REPORT_HEADER + self.num_tokens].tolist()
        for index, (num_verified, length, num_found, num_agreeing, *tokens) in zip(self.searched, found, strict=True):
            if index >= 0:
                some = LookedUp(num_verified, length, num_found, num_agreeing, tokens) if length else _NOTHING
                rows[index].looked_up = some


class DeviceLookup:
    """num_slots: texts that are kept; a step has no more rows with one. max_context: tokens of the longest sequence. depth:
    steps under way at once, so many pinned reports are used in turn. more_proposals: see `new_texts`."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_context: int,
        depth: int,
        device: torch.device,
        max_bytes: int = MAX_BYTES,
        more_proposals: int = 0,
    ) -> None:
        """:raises ValueError: if `max_bytes` are too few for so many texts."""
        capacity = min(capacity_within(max_bytes, num_slots), 1 << max(6, (max_context - 1).bit_length()))
        self.texts = new_texts(num_slots, capacity, device, more_proposals=more_proposals)
        self._report = torch.zeros(num_slots, REPORT_WORDS, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._reports = [torch.zeros(num_slots, REPORT_WORDS, dtype=torch.int32, pin_memory=pinned) for _ in range(depth)]
        self._turn = 0
        self._step = 0
        self._slots: OrderedDict[int, _Slot] = OrderedDict()
        """By key of the sequence, that used longest ago first."""

    @property
    def num_slots(self) -> int:
        return len(self._report)

    def passed(self) -> None:
        """A step is launched whose rows have no texts: as `plan` without anything to find."""
        self._step += 1

    def plan(self, rows: Sequence[StepRow], packed: PackedStep) -> PlannedLookup:
        """Find the texts of a step's rows, and what the device lacks of them. Call it for each step that is launched, in order.

        :raises InvalidParameter: if more rows have a text than there are slots.
        """
        self._step += 1
        asking = [(index, row, row.text) for index, row in enumerate(rows) if row.text is not None]
        if len(asking) > len(self._report):
            raise InvalidParameter(
                f"{len(asking)} rows of a step are looked up, and there is room for {len(self._report)} texts"
            )
        for _, _, text in asking:  # before any slot is given away
            if text.key in self._slots:
                self._slots.move_to_end(text.key)
        followed: list[FollowedRow] = []
        searched: list[int] = []
        verified_slots: dict[int, int] = {}
        left, firsts = STEP_TOKENS, packed.firsts.tolist()
        for index, row, text in asking:
            slot, known = self._slot_of(text.key), len(text)
            is_next = slot.step == self._step - 1
            if slot.is_verified and is_next and row.follows_device:
                verified_slots[index] = slot.index
            room = 0 if row.is_posted else min(row.room, MAX_PROPOSAL)
            feed, tokens, begin, is_first, is_whole = row.feed, (), 0, False, True
            if feed < 0 or not is_next or not slot.is_followed:
                is_first = known < slot.known or slot.known < 0 or (slot.is_fed and known == slot.known)
                if is_first:
                    slot.base = slot.known = max(0, known - self.texts.capacity)
                tokens = text[slot.known : slot.known + min(PART_TOKENS, left)]
                left -= len(tokens)
                begin, is_whole = slot.known - slot.base, slot.known + len(tokens) == known
                if not is_whole:
                    feed, room, known = -1, NO_SEARCH, slot.known + len(tokens)
            followed.append(FollowedRow(slot.index, firsts[index], row.start, feed, room, tokens, begin, is_first))
            searched.append(index if is_whole else -1)
            slot.known, slot.step = known, self._step
            slot.is_followed, slot.is_fed, slot.is_verified = is_whole, feed >= 0, room > 0
        return PlannedLookup(followed, searched, verified_slots)

    def launch(self, planned: PlannedLookup, inputs: StepInputs) -> LookupReport | None:
        """Follow the texts of a step whose open rows are settled, before it computes anything. Return what to read once it has
        run; None if there is nothing."""
        num_rows = len(planned.followed)
        if not num_rows:
            return None
        step = FollowedStep(inputs.sampled, inputs.tokens, inputs.positions, self._report)
        follow_rows(self.texts, to_device(pack_rows(planned.followed), self._report.device), num_rows, step)
        self._turn = (self._turn + 1) % len(self._reports)
        words = self._reports[self._turn][:num_rows]
        words.copy_(self._report[:num_rows], non_blocking=True)
        return LookupReport(planned.searched, words, max(_REPORTED, *(row.room for row in planned.followed)))

    def warm_up(self, inputs: StepInputs) -> None:
        """Compile what a step needs."""
        self.launch(PlannedLookup([FollowedRow(0, 0, 0, -1, 0, [0], is_first=True)], [0], {}), inputs)

    def forget(self) -> None:
        """Nobody knows what a step has left: send every text whole when it comes again."""
        self._slots.clear()

    def _slot_of(self, key: int) -> _Slot:
        slot = self._slots.get(key)
        if slot is None:
            if len(self._slots) < len(self._report):
                slot = _Slot(len(self._slots))
            else:
                slot = _Slot(self._slots.pop(next(iter(self._slots))).index)
            self._slots[key] = slot
        return slot


def warm_lookup(
    num_slots: int, max_context: int, depth: int, device: torch.device, inputs: Callable[[], StepInputs]
) -> DeviceLookup:
    """Return a lookup for a runner whose rows also take from the board, with its kernels compiled. inputs: of some step.

    :raises ConfigError: if the GPU has no memory left for its texts.
    """
    try:
        lookup = DeviceLookup(
            num_slots=num_slots, max_context=max_context, depth=depth, device=device, more_proposals=DEVICE_SLOTS
        )
        lookup.warm_up(inputs())
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
    except torch.OutOfMemoryError as error:
        raise ConfigError("no GPU memory is left for texts to look up in: use --lookup off", param="lookup") from error
    return lookup
