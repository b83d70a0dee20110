"""What a prefill or a decode worker asks of its scheduler."""

from __future__ import annotations

from typing import Protocol

from common.engine.sequence import Sequence
from common.worker import stepping


class Scheduler(stepping.Scheduler, Protocol):
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def credits(self) -> int: ...
    def cancel(self, sequence: Sequence) -> None: ...
    def begin_copy(self, sequence: Sequence) -> None: ...
    def end_copy(self, sequence: Sequence, num_computed: int) -> None: ...
