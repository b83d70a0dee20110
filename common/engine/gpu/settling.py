"""What a step still needs when the one before it has run, launched between the two.

    plan the lookup ─► copy the board ─► settle open rows ─► report what was taken ─► look up

A row that was planned before the outcome of the step ahead was known is settled on the device (`ops/sampling/open_rows.py`).
There the device chooses what it verifies: of the outcomes that the host foresaw, of what is posted on the board by then, or
of what it finds in the row's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from common.engine.board import BOARD_SLOTS
from common.engine.gpu.board import DeviceBoard, TakenReport
from common.engine.gpu.lookup import DeviceLookup, LookupReport
from common.engine.gpu.open_rows import open_rows_of
from common.engine.gpu.pinned import to_device
from common.engine.gpu.sampling import DeviceSampler
from common.engine.gpu.step_buffers import Fields, PackedStep
from common.engine.plan import StepRow
from common.ops.sampling.open_row_inputs import StepInputs
from common.ops.sampling.open_rows import pack_open_rows, settle_open_rows


class Settling:
    """`lookup`: None where nothing is looked up. depth: steps under way at once."""

    def __init__(self, *, depth: int, device: torch.device) -> None:
        self._device = device
        self.board = DeviceBoard(depth=depth, device=device)
        self.lookup: DeviceLookup | None = None

    @property
    def proposals(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the device chose for the step ahead, by slot, those of the board behind those of texts; see `StepInputs`."""
        if self.lookup is None:
            return self.board.proposals, self.board.num_proposed
        return self.lookup.texts.proposals, self.lookup.texts.num_proposed

    def inputs(
        self, fields: Fields[torch.Tensor], sampler: DeviceSampler, block_ids: torch.Tensor, block_tokens: int
    ) -> StepInputs:
        """Return the tensors of a step, laid out as `fields`, that the device changes before the graph of the step runs."""
        proposals, num_proposed = self.proposals
        return StepInputs(
            sampled=sampler.sampled,
            tokens=fields.tokens,
            feeds=fields.feeds,
            positions=fields.positions,
            query_starts=fields.query_starts,
            context_lens=fields.context_lens,
            draws=sampler.draws.position,
            slots=fields.slots,
            block_ids=block_ids,
            block_starts=fields.block_starts,
            block_tokens=block_tokens,
            proposals=proposals,
            num_proposed=num_proposed,
            board=self.board.words,
            taken=self.board.taken,
        )

    def passed(self) -> None:
        """Call it instead of `launch` for a step without open rows and without texts."""
        if self.lookup is not None:
            self.lookup.passed()

    def launch(
        self, rows: Sequence[StepRow], packed: PackedStep, inputs_of: Callable[[], StepInputs]
    ) -> list[LookupReport | TakenReport]:
        """Call it for each step, in order. Return what the device will say of what it chose."""
        planned = None if self.lookup is None else self.lookup.plan(rows, packed)
        first_kept = 0 if self.lookup is None else self.lookup.num_slots
        verified_slots = {} if planned is None else planned.verified_slots
        open_rows = open_rows_of(rows, packed, verified_slots, self.board.verifying, first_kept)
        self.board.verifying = {row.board for row in rows if row.is_posted and row.room}
        reports: list[LookupReport | TakenReport] = []
        if not open_rows and (planned is None or not planned.followed):
            return reports
        inputs = inputs_of()
        is_posted = any(row.posted >= 0 for row in open_rows)
        if any(0 <= row.posted < BOARD_SLOTS for row in open_rows):
            self.board.begin()
        if open_rows:
            settle_open_rows(to_device(pack_open_rows(open_rows), self._device), len(open_rows), inputs)
        if is_posted:
            reports.append(self.board.report(rows))
        if self.lookup is None or planned is None:
            return reports
        try:
            found = self.lookup.launch(planned, inputs)
        except BaseException:
            self.lookup.forget()
            raise
        return reports if found is None else [*reports, found]
