"""The proposal board of a GPU: copied when a step begins, and what rows took from it copied back with their samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from common.engine.board import BOARD_SLOTS, HEAD_SLOTS, ProposalBoard
from common.engine.plan import RowSamples, StepRow, Taken
from common.ops.lookup.device_texts import MAX_PROPOSAL
from common.ops.sampling.board_layout import BOARD_WORDS, TAKEN_WORDS

DEVICE_SLOTS = BOARD_SLOTS + HEAD_SLOTS


class TakenReport(NamedTuple):
    """slots: of the step's rows, by index. words: int32 [DEVICE_SLOTS, TAKEN_WORDS], pinned; written once the step has run."""

    slots: dict[int, int]
    words: torch.Tensor

    def put_into(self, rows: Sequence[RowSamples]) -> None:
        """Tell each row what it has taken. The step has run."""
        found: list[list[int]] = self.words.tolist()
        for index, slot in self.slots.items():
            num_taken, num_there, is_cut, *tokens = found[slot]
            rows[index].taken = Taken(tokens[:num_taken], num_there, bool(is_cut))


class DeviceBoard:
    """`posted`: what the host writes. `words`, `taken`, `proposals`, `num_proposed`: on the device, see `StepInputs`; the last
    two where nothing is looked up; slots behind those of `posted` are the head's. `verifying`: slots of which the step that was
    launched last verifies something. depth: steps under way at once."""

    def __init__(self, *, depth: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.zeros(BOARD_SLOTS, BOARD_WORDS, dtype=torch.int32, pin_memory=pinned)
        self.posted = ProposalBoard(self._host.numpy())
        self.words = torch.zeros(DEVICE_SLOTS, BOARD_WORDS, dtype=torch.int32, device=device)
        self.taken = torch.zeros(DEVICE_SLOTS, TAKEN_WORDS, dtype=torch.int32, device=device)
        self.proposals = torch.zeros(DEVICE_SLOTS, MAX_PROPOSAL, dtype=torch.int32, device=device)
        self.num_proposed = torch.zeros(DEVICE_SLOTS, dtype=torch.int32, device=device)
        self._reports = [torch.zeros(DEVICE_SLOTS, TAKEN_WORDS, dtype=torch.int32, pin_memory=pinned) for _ in range(depth)]
        self._turn = 0
        self.verifying: set[int] = set()

    def begin(self) -> None:
        """The step that is launched takes what is posted when it begins: the copy runs behind the step before."""
        self.words[:BOARD_SLOTS].copy_(self._host, non_blocking=True)

    @property
    def drafted(self) -> torch.Tensor:
        """Where the head posts: int32 [HEAD_SLOTS, BOARD_WORDS]."""
        return self.words[BOARD_SLOTS:]

    def report(self, rows: Sequence[StepRow]) -> TakenReport:
        """Return what to read once the step has run."""
        self._turn = (self._turn + 1) % len(self._reports)
        words = self._reports[self._turn]
        words.copy_(self.taken, non_blocking=True)
        return TakenReport({index: row.board for index, row in enumerate(rows) if row.is_posted}, words)
