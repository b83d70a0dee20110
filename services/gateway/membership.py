"""Which prefill and decode workers this gateway may use: those that serve its model, by name and by weights. Pure.

A worker that was given no name announces one made of what was typed as its model: it joins a gateway that serves these weights,
whatever the gateway calls them. One that was given a name joins those who serve that name.

Two files may bear the same name, and a request that moved from one to the other would go on as another model. So workers
must agree on what their weights are (`Presence.identity`) as well: with the files that the gateway has itself, or, where it has
none, with the first ready worker for as long as such workers live.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence

MAX_REMEMBERED = 4096


class Stranger(msgspec.Struct, frozen=True):
    """A worker that is left alone although it looks like one of ours, and what an operator could do about it."""

    worker: WorkerRef
    reason: str
    advice: str


class Membership:
    """`names`: under which workers may announce what this gateway serves, its own first. `identity`: what its own files are,
    empty where they hold no weights."""

    def __init__(self, names: Sequence[str], identity: str = "") -> None:
        self.name = names[0]
        self.names = frozenset(names)
        self.identity = identity
        self.adopted = ""
        """The identity of the workers in use."""
        self._told: dict[WorkerRef, None] = {}
        self._strangers: list[Stranger] = []

    def members(self, presences: Iterable[Presence]) -> list[Presence]:
        """Those of `presences` that may be used."""
        presences = list(presences)
        candidates = [presence for presence in presences if self._is_meant(presence) and self._suits(presence.identity)]
        named = {presence.identity: None for presence in candidates if presence.identity}
        if self.adopted not in named:
            ready = (presence.identity for presence in candidates if presence.state == "ready" and presence.identity)
            self.adopted = next(ready, "")
        members = [presence for presence in candidates if presence.identity in ("", self.adopted)]
        if len(members) < len(presences):
            self._notice(presences)
        return members

    def take_strangers(self) -> list[Stranger]:
        """Those that were met since the last call, each life of a worker once."""
        strangers, self._strangers = self._strangers, []
        return strangers

    def _is_meant(self, presence: Presence) -> bool:
        """Whether it announces this model: by name, or by weights where nobody chose its name."""
        if presence.model in self.names:
            return True
        weights = self.identity or self.adopted.removeprefix("dummy/")
        return not presence.named and presence.identity.removeprefix("dummy/") == weights != ""

    def _suits(self, identity: str) -> bool:
        return not self.identity or identity.removeprefix("dummy/") in ("", self.identity)

    def _notice(self, presences: Iterable[Presence]) -> None:
        in_use = self.adopted or self.identity
        for presence in presences:
            worker, identity = presence.worker, presence.identity
            if worker in self._told or not identity or not in_use:
                continue
            if presence.model in self.names and identity != in_use:
                reason = f"it serves other weights as {self.name}"
                advice = "give it the same files and version of Penstock, or another --served-model-name"
            elif presence.model not in self.names and identity == in_use and presence.named:
                reason = f"it serves these weights as {presence.model}"
                advice = f"to join here it needs --served-model-name {self.name}"
            else:
                continue
            self._told[worker] = None
            while len(self._told) > MAX_REMEMBERED:
                del self._told[next(iter(self._told))]
            self._strangers.append(Stranger(worker, reason, advice))
