"""When a worker publishes a heartbeat before it is due.

Gateways place prompts by what workers have to compute. Of what others send they hear once a heartbeat, and meanwhile each of
them takes a worker for less busy than it is: with three gateways on four workers, 73 % of prompts were in time where 94 are if
they hear at once (docs/decisions/0083).
"""

from __future__ import annotations

from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from common.engine.sequence import Sequence

LONG_TOKENS = 512
"""A prompt with fewer tokens left to compute makes no other late, and is not worth a heartbeat."""
APART_S = 0.05
"""Seconds between two early heartbeats, at least."""
_SENDING_S = 10.0
"""A gateway that has sent nothing for so long does not count as one that sends prompts."""


class Announcer(Protocol):
    """What is needed of an actor."""

    task_group: TaskGroup

    def clock(self) -> float: ...
    def announce(self) -> None: ...


class EarlyHeartbeats:
    """Of a worker: one for each long prompt, where several gateways send to it."""

    def __init__(self, worker: Announcer) -> None:
        self._worker = worker
        self._senders: dict[str, float] = {}
        """When each gateway last sent something."""
        self._published_at = float("-inf")
        self._is_waiting = False

    def admitted(self, sequence: Sequence) -> None:
        """Call it for each request that was."""
        now, gateway = self._worker.clock(), sequence.generation.gateway.id
        self._senders[gateway] = now
        if len(self._senders) > 1:
            self._senders = {sender: at for sender, at in self._senders.items() if now - at < _SENDING_S}
        if len(self._senders) < 2 or self._is_waiting or sequence.num_uncomputed < LONG_TOKENS:
            return
        wait_s = self._published_at + APART_S - now
        if wait_s > 0:
            self._is_waiting = True
            self._worker.task_group.start_soon(self._publish_in, wait_s)
        else:
            self._publish()

    async def _publish_in(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        self._is_waiting = False
        self._publish()

    def _publish(self) -> None:
        self._published_at = self._worker.clock()
        self._worker.announce()
