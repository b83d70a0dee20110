"""Who else is there, for one actor: heartbeats go into a registry, silent peers are probed, lost ones are reported.

A peer that is silent for about two heartbeats gets an empty message. A living process answers at once; when nobody listens any
more the process is gone, and is lost without waiting for `dead_after_s`. While the bus is away nobody is lost, and afterwards
everyone gets `dead_after_s` to be heard again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from anyio.abc import TaskGroup

from common.protocol import subjects
from common.protocol.errors import NoResponders, PenstockError
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from common.runtime import logs
from common.runtime.bus import Bus
from common.runtime.registry import Registry

PROBE = b""
"""An empty message asks "are you there?". It is answered in kind, before anything is decoded."""

SUSPECT_AFTER_HEARTBEATS = 2.2

log = logs.get("peers")


class Peers:
    """`on_lost(peer)` is called once for each life of a peer that is over."""

    def __init__(
        self,
        bus: Bus,
        *,
        heartbeat_s: float,
        dead_after_s: float,
        clock: Callable[[], float],
        on_lost: Callable[[Presence], None],
    ) -> None:
        self.registry = Registry(dead_after_s)
        self._bus = bus
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._clock = clock
        self._on_lost = on_lost
        self._probing: set[str] = set()
        self._reconnected_at = -math.inf

    def is_settled(self, now: float) -> bool:
        """Whether the bus has been back for long enough that everyone else has had time to return, too."""
        return self._bus.connected and now - self._reconnected_at > self._dead_after_s

    def connection_changed(self, connected: bool, now: float) -> None:
        if connected:
            self._reconnected_at = now
            self.registry.resume(now)
        else:
            self.registry.pause(now)

    def look_around(self, now: float, tasks: TaskGroup) -> None:
        """Once a heartbeat: report who is lost, and probe who is silent."""
        self._report_lost(now)
        if not self.is_settled(now):
            return
        for peer in self.registry.suspects(now, SUSPECT_AFTER_HEARTBEATS * self._heartbeat_s):
            if peer.worker.id not in self._probing:
                self._probing.add(peer.worker.id)
                tasks.start_soon(self._probe, peer.worker)

    def _report_lost(self, now: float) -> None:
        for peer in self.registry.lost(now):
            self._on_lost(peer)

    async def _probe(self, peer: WorkerRef) -> None:
        try:
            await self._bus.request(subjects.inbox(peer.role, peer.id), PROBE, timeout_s=2 * self._heartbeat_s)
            self.registry.touch(peer.id, self._clock())
        except NoResponders:
            known = self.registry.get(peer.id)
            if self.is_settled(self._clock()) and known is not None and known.worker == peer:
                self.registry.mark_lost(peer.id)
                self._report_lost(self._clock())
        except PenstockError as error:
            log.debug("probe_unanswered", peer=peer.id, reason=str(error))
        finally:
            self._probing.discard(peer.id)
