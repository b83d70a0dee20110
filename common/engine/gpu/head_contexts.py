"""Which part of each text a GPU's head knows: where its contexts begin, as the host plans it.

A head needs hidden states of every position from the beginning of its context on. A row goes on with the context of its slot if
that was begun for its sequence, and every row since was drafted for; else the context begins anew with this row. So after a
cached prefix, a hand-off or a pause the head knows less of the text, which costs acceptance and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.board import BOARD_SLOTS, HEAD_SLOTS
from common.engine.gpu.step_buffers import PackedStep
from common.engine.plan import StepRow
from common.ops.drafting.head_inputs import NO_CONTEXT, WINDOW, HeadRow

_NOBODY = -1


@dataclass(slots=True)
class _Context:
    """serial: of the sequence; base: the position where it begins."""

    serial: int = _NOBODY
    base: int = 0


class HeadContexts:
    def __init__(self) -> None:
        self._contexts = [_Context() for _ in range(HEAD_SLOTS)]
        self._is_empty = True

    def passed(self) -> None:
        """A step is launched without the head: what it computed of any text is unknown here."""
        if not self._is_empty:
            for context in self._contexts:
                context.serial = _NOBODY
            self._is_empty = True

    def plan(self, rows: Sequence[StepRow], packed: PackedStep) -> tuple[list[HeadRow], list[int]]:
        """Return the rows of a step as the head sees them, and the contexts that now belong to another sequence; no rows where
        nothing is drafted. Call it for each step that is launched, in order."""
        if len(rows) > HEAD_SLOTS or not any(map(_is_drafted, rows)):
            self.passed()
            return [], []
        planned: list[HeadRow] = []
        new: list[int] = []
        sample = 0
        for row, first in zip(rows, packed.firsts.tolist(), strict=True):
            index, base, length = row.board - BOARD_SLOTS, 0, len(row.tokens)
            if _is_drafted(row):
                context = self._contexts[index]
                if context.serial != row.serial:
                    new.append(index)
                if context.serial != row.serial or row.start < context.base or length > WINDOW:
                    context.serial, context.base = row.serial, row.start + max(0, length - WINDOW)
                base = context.base
            else:
                if index >= 0:
                    self._contexts[index].serial = _NOBODY
                index = NO_CONTEXT
            planned.append(HeadRow(first, length, row.num_samples, sample, index, base, row.following))
            sample += row.num_samples
        self._is_empty = False
        return planned, new


def _is_drafted(row: StepRow) -> bool:
    return row.drafts > 0 and row.serial >= 0 and row.board >= BOARD_SLOTS
