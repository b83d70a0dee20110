"""How far each worker is to be trusted, by what became of requests there. Pure: `now` is an argument.

unproven ─ a token came ─► proven ─ failures, no success between ─► quarantined ─ time passed ─► unproven

Workers are named by id: one that dies again and again comes back under the id it had, with a later epoch. A worker that is
unproven or quarantined gets requests only when no other has room, and canaries (`canary.py`), so that a client's request is not
what finds out. Failures that a request takes from worker to worker say little about the workers: any success forgives them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from common.protocol.handles import WorkerRef

STRIKES = 3
"""Failures, with no success between, for which a worker is quarantined."""
FORGET_AFTER_S = 60.0
"""A failure so long ago does not count."""
FIRST_QUARANTINE_S = 5.0
MAX_QUARANTINE_S = 120.0


class _Record(msgspec.Struct):
    """`epoch`: of the life that gave a token, 0 for none; `proven_at`: when it did so last."""

    epoch: int = 0
    proven_at: float = -1e9
    strikes: int = 0
    struck_at: float = -1e9
    quarantined_until: float = -1e9


class Health:
    """`trusting`: no canaries are sent, so that who has not given a token yet is as good as any."""

    def __init__(self, *, trusting: bool = False) -> None:
        self._trusting = trusting
        self._records: dict[str, _Record] = {}

    def succeeded(self, worker: WorkerRef, now: float) -> None:
        """It gave a token."""
        record = self._record(worker.id)
        record.epoch, record.proven_at = worker.epoch, now
        record.strikes = 0
        record.quarantined_until = -1e9

    def failed(self, worker: WorkerRef, now: float, *, strikes: int = 1) -> bool:
        """It failed a request, did not answer, or died. Returns whether it is quarantined for it."""
        record = self._record(worker.id)
        record.strikes = strikes + (record.strikes if now - record.struck_at < FORGET_AFTER_S else 0)
        record.struck_at = now
        if record.strikes < STRIKES:
            return False
        record.epoch = 0
        period_s = min(FIRST_QUARANTINE_S * 2 ** (record.strikes - STRIKES), MAX_QUARANTINE_S)
        record.quarantined_until = now + period_s
        return True

    def proven(self, worker: WorkerRef) -> bool:
        """This life of it has given a token, and it was not quarantined since."""
        record = self._records.get(worker.id)
        return record is not None and record.epoch == worker.epoch

    def proven_at(self, worker: WorkerRef) -> float:
        """When this life of it gave a token last; long ago if it never did."""
        record = self._records.get(worker.id)
        return record.proven_at if record is not None and record.epoch == worker.epoch else -1e9

    def quarantined(self, worker: WorkerRef, now: float) -> bool:
        record = self._records.get(worker.id)
        return record is not None and now < record.quarantined_until

    def doubtful(self, workers: Iterable[WorkerRef], now: float) -> frozenset[str]:
        """The ids of those that are unproven or quarantined."""
        return frozenset(
            worker.id for worker in workers if self.quarantined(worker, now) or not (self._trusting or self.proven(worker))
        )

    def forget(self, alive: Iterable[str], now: float) -> None:
        """Drop what is known of ids that are gone, once no failure of theirs counts any longer."""
        kept = frozenset(alive)
        self._records = {
            worker: record
            for worker, record in self._records.items()
            if worker in kept or now < max(record.struck_at + FORGET_AFTER_S, record.quarantined_until)
        }

    def _record(self, worker_id: str) -> _Record:
        return self._records.setdefault(worker_id, _Record())
