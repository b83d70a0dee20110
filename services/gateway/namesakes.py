"""Gateways that would answer each other's requests: names of their models differ and have the same slug, or one name means
two models, or one model of other weights.

Every gateway hears the others' heartbeats. Of two such namesakes the one that started later gives way, so that whoever served
a subject first goes on.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from common.protocol import messages, subjects
from common.protocol.errors import ConfigError, ProtocolError
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence, ServedModel
from common.runtime.bus import BusMessage


class Namesakes:
    """`me`: who this gateway is now. The names of its models are what its own heartbeat says."""

    def __init__(self, me: Callable[[], WorkerRef]) -> None:
        self._me = me
        self._mine: dict[str, dict[str, ServedModel]] = {}
        """By slug: my names, and whose each is."""
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
            if not self._mine:
                self._know(presence.served)
        elif self._mine and (presence.worker.epoch, presence.worker.id) < (me.epoch, me.id):
            for model in presence.served:
                self._compare(model, presence.worker.id)

    async def collision(self) -> ConfigError:
        """Wait for a namesake that this gateway must give way to; returns what to tell the operator."""
        await self._found.wait()
        assert self._error is not None
        return self._error

    def _know(self, served: list[ServedModel]) -> None:
        for model in served:
            for name in (model.name, *model.aliases):
                self._mine.setdefault(subjects.slug(name), {})[name] = model

    def _compare(self, theirs: ServedModel, gateway: str) -> None:
        for name in (theirs.name, *theirs.aliases):
            slug = subjects.slug(name)
            for mine, model in self._mine.get(slug, {}).items():
                if model.name == theirs.name and not _differ(model.identity, theirs.identity):
                    continue
                if model.name == theirs.name:
                    problem = f"{mine!r} has other weights here than at {gateway}, and requests for it"
                elif mine == name:
                    problem = f"{mine!r} is {model.name!r} here and {theirs.name!r} at {gateway}, and requests for it"
                else:
                    problem = f"{mine!r} and {name!r}, which {gateway} serves,"
                self._error = ConfigError(
                    f"{problem} would share the NATS subject {subjects.chat(slug)}: "
                    "serve this one under another name with --served-model-name",
                    param="served_model_name",
                )
                self._found.set()


def _differ(mine: str, theirs: str) -> bool:
    """Whether both gateways know what their weights are, and these are not the same."""
    return bool(mine and theirs) and mine != theirs
