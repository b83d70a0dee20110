"""A view: one API's way to ask for answers and to be told them. Pure.

    body ─► View.parse ─► the request that all views share, and the writers of its answer
    typed deltas ─► StreamWriter or WholeWriter ─► the API's own events, chunks or body

Everything between the two (models, admission, dispatch, failover, deadlines, cancelling, metrics, access log) is the same for
all views and both edges, and knows none of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from common.protocol.errors import PenstockError, RequestError
from services.gateway.arguments import Notes
from services.gateway.job import Writers
from services.gateway.json_slices import Steps
from services.gateway.openai import ChatRequest, CompletionRequest

ViewName = Literal["chat", "completion", "responses", "messages"]


class Parsed(NamedTuple):
    """A body that was read."""

    request: ChatRequest | CompletionRequest
    writers: Writers


class View(Protocol):
    """One API. `id_prefix`: of the ids of its answers. `id_headers`: HTTP headers that tell a request's id. `keep_alive`: what
    is sent on an idle stream over SSE."""

    @property
    def id_prefix(self) -> str: ...

    @property
    def id_headers(self) -> tuple[bytes, ...]: ...

    @property
    def keep_alive(self) -> bytes: ...

    def parse(self, body: bytes, *, max_prompt_tokens: int, notes: Notes) -> Steps[Parsed]:
        """Read a body. What of it has no effect is told to `notes`, which may refuse it.

        :raises RequestError: naming the argument, for anything that a well-formed body does not have.
        """
        ...

    def in_its_terms(self, error: RequestError) -> RequestError:
        """An error about the shared request, with the names that this API has for arguments."""
        ...

    def error_body(self, error: PenstockError) -> bytes:
        """The body that tells an error."""
        ...


class CountingView(View, Protocol):
    """A view whose prompts can be counted, which are chats."""

    def count_body(self, num_tokens: int) -> bytes:
        """The body that tells how many tokens a prompt has."""
        ...
