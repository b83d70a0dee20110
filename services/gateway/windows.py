"""How much may be on its way to this gateway: one budget, shared out among the workers that send. Pure: `now` is an argument.

A worker whose share is used up merges what it has until this gateway acknowledges. So the queue in front of it is bounded,
however many tokens engines make, and what waits costs less to take. The budget follows how long messages wait here: it is what
this machine, which may be slow or busy, takes in `TARGET_S`.
"""

from __future__ import annotations

import msgspec

from common.protocol.handles import WorkerRef

TOTAL_UNITS = 4096
"""Of frames (`messages.frame_units`): about a sixth of a second of work where nobody else wants the core."""
FIRST_TOTAL_UNITS = 1024
LEAST_TOTAL_UNITS = 512
MIN_UNITS = 64
"""Each worker may send so much, however many there are."""
TARGET_S = 0.15
"""How long a message may wait."""
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
        self._total = float(FIRST_TOTAL_UNITS)
        self._adapted_at = -1e9

    @property
    def size(self) -> int:
        """What one worker may have on its way."""
        return max(MIN_UNITS, int(self._total) // self._num_active)

    def waited(self, waited_s: float, units: int, now: float) -> None:
        """A message of so many units was taken, so long after it arrived."""
        if waited_s > TARGET_S:
            if now - self._adapted_at > waited_s:  # those that arrive now were sent under the budget of before
                self._adapted_at = now
                self._total = max(LEAST_TOTAL_UNITS, self._total * max(0.25, TARGET_S / waited_s))
        elif waited_s < TARGET_S / 2:
            self._total = min(TOTAL_UNITS, self._total + units / 8)

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
