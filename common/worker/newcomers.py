"""When a worker says how busy it is between two heartbeats.

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
"""Of a prompt, to compute: shorter ones make no one late."""
APART_S = 0.05
"""Between two words out of turn, at least."""
_SENDING_S = 10.0
"""A gateway that has sent nothing for so long does not count as one that sends prompts."""


class Announcer(Protocol):
    """What an actor has."""

    task_group: TaskGroup

    def clock(self) -> float: ...
    def announce(self) -> None: ...


class Newcomers:
    """Long prompts are told of at once where several gateways send to a worker."""

    def __init__(self, worker: Announcer) -> None:
        self._worker = worker
        self._senders: dict[str, float] = {}
        """When each gateway last sent something."""
        self._told_at = float("-inf")
        self._is_waiting = False

    def came(self, sequence: Sequence) -> None:
        """A request has been admitted."""
        now, gateway = self._worker.clock(), sequence.generation.gateway.id
        self._senders[gateway] = now
        if sequence.num_uncomputed < LONG_TOKENS or self._is_waiting or len(self._senders) < 2:
            return
        self._senders = {sender: at for sender, at in self._senders.items() if now - at < _SENDING_S}
        if len(self._senders) < 2:
            return
        wait_s = self._told_at + APART_S - now
        if wait_s > 0:
            self._is_waiting = True
            self._worker.task_group.start_soon(self._tell_in, wait_s)
        else:
            self._tell()

    async def _tell_in(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        self._is_waiting = False
        self._tell()

    def _tell(self) -> None:
        self._told_at = self._worker.clock()
        self._worker.announce()
