"""Who is alive, as told by presence heartbeats. Pure: `now` is an argument.

A worker lives until it was silent for `dead_after_s`, until somebody proves it gone (`mark_lost`), or until a later epoch
of the same id appears. Heartbeats of an epoch older than the newest one seen are ignored. While the bus is away nobody
can be heard, so nobody is lost, and afterwards everybody has `dead_after_s` to be heard again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from common.protocol.handles import Role
from common.protocol.messages import Presence

MAX_REMEMBERED_EPOCHS = 65536
MAX_WORKERS_PER_ROLE = 4096
"""Beyond it new workers are not listened to. Those that are known stay: whoever floods the bus with heartbeats of workers that
do not exist must not drive out those that do."""


class _Entry(msgspec.Struct):
    presence: Presence
    heard_at: float


class Registry:
    def __init__(self, dead_after_s: float) -> None:
        self.dead_after_s = dead_after_s
        self._entries: dict[str, _Entry] = {}
        self._newest_epoch: dict[str, int] = {}
        self._newly_lost: list[Presence] = []
        self._paused = False
        self._num_by_role: Counter[Role] = Counter()
        self.on_heard: Callable[[Presence], object] = lambda presence: None
        """Called with what a life says that is known to be alive."""
        self.num_ignored = 0
        """Heartbeats of workers for whom there was no room."""

    def __len__(self) -> int:
        return len(self._entries)

    def observe(self, presence: Presence, now: float) -> bool:
        """Returns True if this life of the worker was not known to be alive before."""
        worker = presence.worker
        newest = self._newest_epoch.get(worker.id, -1)
        if worker.epoch < newest:
            return False
        entry = self._entries.get(worker.id)
        if entry is not None and worker.epoch == entry.presence.worker.epoch:
            entry.presence = presence
            entry.heard_at = now
            self.on_heard(presence)
            return False
        if entry is not None:
            self._drop(worker.id)
        if self._num_by_role[worker.role] >= MAX_WORKERS_PER_ROLE:
            self.num_ignored += 1
            return False
        self._remember(worker.id, worker.epoch)
        self._entries[worker.id] = _Entry(presence, now)
        self._num_by_role[worker.role] += 1
        return True

    def superseded_by(self, presence: Presence) -> int:
        """Return the latest epoch heard of the worker, if it speaks for an earlier one and that later life is over; else 0."""
        worker = presence.worker
        newest = self._newest_epoch.get(worker.id, -1)
        return newest if worker.epoch < newest and worker.id not in self._entries else 0

    def touch(self, worker_id: str, now: float) -> None:
        """The worker was heard in another way, for example by an answer."""
        entry = self._entries.get(worker_id)
        if entry is not None:
            entry.heard_at = max(entry.heard_at, now)

    def alive(self, role: Role | None, now: float) -> list[Presence]:
        """The living workers of a role (None: of all), ready ones first, in the order in which they appeared.

        Starting and draining workers are among them: look at `state` before giving them work.
        """
        ready: list[Presence] = []
        others: list[Presence] = []
        for entry in self._entries.values():
            presence = entry.presence
            if (role is None or presence.worker.role == role) and not self._is_dead(entry, now):
                (ready if presence.state == "ready" else others).append(presence)
        return ready + others

    def get(self, worker_id: str) -> Presence | None:
        """What the worker said last, unless it is lost."""
        entry = self._entries.get(worker_id)
        return None if entry is None else entry.presence

    def suspects(self, now: float, silent_s: float) -> list[Presence]:
        """Those not lost, but silent for longer than `silent_s`."""
        if self._paused:
            return []
        return [entry.presence for entry in self._entries.values() if now - entry.heard_at > silent_s]

    def lost(self, now: float) -> list[Presence]:
        """Who died since the last call: each life of each worker once, and nobody while paused."""
        if self._paused:
            return []
        for worker_id, entry in list(self._entries.items()):
            if self._is_dead(entry, now):
                self._drop(worker_id)
        newly_lost, self._newly_lost = self._newly_lost, []
        return newly_lost

    def mark_lost(self, worker_id: str) -> None:
        """Somebody knows that the worker is gone. The next `lost` reports it. A heartbeat brings it back."""
        if worker_id in self._entries:
            self._drop(worker_id)

    def pause(self, now: float) -> None:
        self._paused = True

    def resume(self, now: float) -> None:
        """Nobody could be heard up to `now`: everyone gets a fresh `dead_after_s`."""
        self._paused = False
        for entry in self._entries.values():
            entry.heard_at = max(entry.heard_at, now)

    def _drop(self, worker_id: str) -> None:
        """The next `lost` reports it."""
        lost = self._entries.pop(worker_id).presence
        self._num_by_role[lost.worker.role] -= 1
        self._newly_lost.append(lost)

    def _remember(self, worker_id: str, epoch: int) -> None:
        self._newest_epoch[worker_id] = epoch
        if len(self._newest_epoch) > MAX_REMEMBERED_EPOCHS:
            self._newest_epoch = {known: self._newest_epoch[known] for known in self._entries} | {worker_id: epoch}

    def _is_dead(self, entry: _Entry, now: float) -> bool:
        return not self._paused and now - entry.heard_at > self.dead_after_s
