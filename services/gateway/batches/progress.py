"""How far a batch is, by the results that are kept of it. Pure."""

from __future__ import annotations

import msgspec

from services.gateway.batches.records import Batch


class Progress:
    """`sequence`: of the newest result that is counted here. Lines count from 0."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.sequence = 0
        self.completed = 0
        self.failed = 0
        self._has = bytearray(total)

    @property
    def is_whole(self) -> bool:
        """Every line has its result."""
        return self.completed + self.failed >= self.total

    def has(self, line: int) -> bool:
        return line < self.total and bool(self._has[line])

    def add(self, line: int, sequence: int, *, completed: bool) -> None:
        """Count a result. One of a line that has one, or of a line that is not in the batch, counts for nothing."""
        self.sequence = max(self.sequence, sequence)
        if not 0 <= line < self.total or self._has[line]:
            return
        self._has[line] = 1
        if completed:
            self.completed += 1
        else:
            self.failed += 1

    def told(self, batch: Batch) -> Batch:
        return msgspec.structs.replace(batch, completed=self.completed, failed=self.failed)
