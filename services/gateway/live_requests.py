"""Requests over NATS that are under way, and who may cancel which. Pure.

The bus does not say who sent a message. What only the sender of a request knows is where it listens: its inbox is random, goes
to a gateway alone, and nobody else may subscribe to requests or to others' inboxes. So a name that a client chose belongs to
the inbox it came with; two clients may choose the same. An id that the gateway minted is a secret itself, told to that inbox
alone.

Requests and cancels come by subscriptions of their own, and one that arrived second may be handled first: a cancel that meets
nobody holds for the requests that had arrived before it.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from common.protocol.errors import DuplicateRequest


class Owned(Protocol):
    """A request: `minted` by the gateway, named `request` (the same, unless its client chose a name), answered on `inbox`."""

    minted: str
    request: str
    inbox: str


R = TypeVar("R", bound=Owned)

MAX_EARLY = 1024
"""Cancels to keep for requests that wait to be handled; the oldest go first."""


class LiveRequests(dict[str, R]):
    """Requests by minted id; change it with `add` and `remove` alone."""

    def __init__(self) -> None:
        super().__init__()
        self._by_inbox: dict[tuple[str, str], R] = {}
        self._early: dict[tuple[str, str], int] = {}

    def check_new(self, name: str, inbox: str) -> None:
        """:raises DuplicateRequest: a request of that name is answered on the same inbox."""
        if (inbox, name) in self._by_inbox:
            raise DuplicateRequest("a request with this id is running: use another id, or cancel that one")

    def add(self, request: R) -> None:
        self[request.minted] = self._by_inbox[request.inbox, request.request] = request

    def remove(self, request: R) -> None:
        del self[request.minted], self._by_inbox[request.inbox, request.request]

    def cancelled_by(self, id: str, inbox: str) -> R | None:
        """The request that a cancel of `id` means, whose reply subject is `inbox`; None if it is nobody's, or another's."""
        request = self.get(id)
        if request is not None and request.request == request.minted:
            return request
        return self._by_inbox.get((inbox, id))

    def expect_cancelled(self, id: str, inbox: str, *, until: int) -> None:
        """A cancel met nobody, and requests are waiting: it holds for the first `until` of all that ever came."""
        self._early.pop((inbox, id), None)
        if len(self._early) >= MAX_EARLY:
            del self._early[next(iter(self._early))]
        self._early[inbox, id] = until

    def was_cancelled(self, request: R, *, number: int) -> bool:
        """Whether a cancel of `request` was handled before it; it was the `number`-th of all, from 1."""
        return number <= self._early.pop((request.inbox, request.request), 0)
