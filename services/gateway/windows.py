"""How much may be on its way to this gateway: one budget, shared out among the workers that send. Pure: `now` is an argument.

A worker whose share is used up merges what it has until this gateway acknowledges. So the queue in front of it is bounded,
however many tokens engines make, and what waits costs less to take.
"""

from __future__ import annotations

import msgspec

from common.protocol.handles import WorkerRef

TOTAL_UNITS = 4096
"""Of frames (`messages.frame_units`): about a tenth of a second of work."""
MIN_UNITS = 64
ACTIVE_S = 2.0


class _Sender(msgspec.Struct):
    number: int = 0
    units: int = 0
    acknowledged: int = 0
    sent_at: float = 0.0


class Windows:
    def __init__(self) -> None:
        self._senders: dict[WorkerRef, _Sender] = {}
        self._num_active = 1

    @property
    def size(self) -> int:
        """What one worker may have on its way."""
        return max(MIN_UNITS, TOTAL_UNITS // self._num_active)

    def took(self, worker: WorkerRef, number: int, units: int, now: float) -> bool:
        """A whole message was worked through. Returns whether to acknowledge it now."""
        sender = self._senders.setdefault(worker, _Sender())
        sender.number, sender.sent_at = number, now
        sender.units += units
        return sender.units >= self.size // 8

    def acknowledge(self, worker: WorkerRef) -> int:
        """The number to acknowledge."""
        sender = self._senders[worker]
        sender.units, sender.acknowledged = 0, sender.number
        return sender.number

    def tick(self, now: float) -> list[WorkerRef]:
        """Those whose last messages have not been acknowledged. Once a heartbeat."""
        self._senders = {worker: sender for worker, sender in self._senders.items() if now - sender.sent_at < ACTIVE_S}
        self._num_active = max(1, len(self._senders))
        return [worker for worker, sender in self._senders.items() if sender.acknowledged < sender.number]
