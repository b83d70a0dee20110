"""Gateways whose models' names differ and have the same slug: they would share subjects, and answer each other's requests.

Every gateway hears the others' heartbeats. Of two such namesakes the one that started later gives way, so that whoever served
a subject first goes on.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from common.protocol import messages, subjects
from common.protocol.errors import ConfigError, ProtocolError
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from common.runtime.bus import BusMessage


class Namesakes:
    """`me`: who this gateway is now. Its own name is what its own heartbeat says."""

    def __init__(self, me: Callable[[], WorkerRef]) -> None:
        self._me = me
        self._name = ""
        self._error: ConfigError | None = None
        self._found = anyio.Event()

    def hear(self, message: BusMessage) -> None:
        """A gateway's heartbeat, this one's included."""
        try:
            presence = messages.decode(message.data)
        except ProtocolError:
            return  # the actor counts it
        if not isinstance(presence, Presence) or not subjects.is_presence_of(
            message.subject, presence.worker.role, presence.worker.id
        ):
            return
        me = self._me()
        if presence.worker.id == me.id:
            self._name = presence.model
        elif self._name and self._collides(presence) and (presence.worker.epoch, presence.worker.id) < (me.epoch, me.id):
            subject = subjects.chat(subjects.slug(self._name))
            self._error = ConfigError(
                f"{self._name!r} and {presence.model!r}, which {presence.worker.id} serves, would share the NATS subject "
                f"{subject}: serve this one under another name with --served-model-name",
                param="served_model_name",
            )
            self._found.set()

    async def collision(self) -> ConfigError:
        """Wait for a namesake that this gateway must give way to; returns what to tell the operator."""
        await self._found.wait()
        assert self._error is not None
        return self._error

    def _collides(self, presence: Presence) -> bool:
        return presence.model != self._name and subjects.slug(presence.model) == subjects.slug(self._name)
