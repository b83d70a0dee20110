"""A view: one API's way to ask for answers and to be told them. Pure.

    body ─► View.parse ─► the request that all views share, and the writers of its answer
    typed deltas ─► StreamWriter or WholeWriter ─► the API's own events, chunks or body

Everything between the two (models, admission, dispatch, failover, deadlines, cancelling, metrics, access log) is the same for
all views and both edges, and knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from common.protocol.errors import PenstockError, RequestError
from services.gateway.arguments import Notes
from services.gateway.bodies import Usage
from services.gateway.choices import Delta
from services.gateway.json_slices import Steps
from services.gateway.logprobs import TokenNames
from services.gateway.openai import ChatRequest, CompletionRequest
from services.gateway.whole import Pieces

if TYPE_CHECKING:
    from services.gateway.prepare import Job

ViewName = Literal["chat", "completion", "responses", "messages"]


class StreamWriter(Protocol):
    """Encodes one streamed answer. Over SSE, what a method returns is written as it is; over NATS, each piece is a message.

    A piece goes out for (nearly) every token, so all of it but the new text should be encoded beforehand.
    """

    @property
    def size(self) -> int:
        """Bytes of the answer that are kept until its end."""
        ...

    def opening(self) -> list[bytes]:
        """What comes before the first delta. Asked for when that has arrived."""
        ...

    def delta(self, index: int, delta: Delta, /) -> list[bytes]:
        """A delta of choice `index`; nothing to tell, nothing returned."""
        ...

    def ending(self, index: int, delta: Delta, /) -> list[bytes]:
        """The answer's last delta, and the end."""
        ...

    def failure(self, error: PenstockError, /) -> bytes:
        """The end of a stream that fails, over SSE. Nothing may have gone out but the opening and deltas."""
        ...


class WholeWriter(Protocol):
    """Puts an answer that is not streamed together, delta by delta. `size`: bytes so far, but for a few."""

    size: int

    def add(self, index: int, delta: Delta, /) -> None: ...

    def finish(self, usage: Usage, /) -> Pieces:
        """The body; nothing can be added any more."""
        ...


class Writers(Protocol):
    """Makes what encodes the answer to one request."""

    def stream(self, job: Job, names: TokenNames, usage: Callable[[], Usage], *, sse: bool) -> StreamWriter:
        """`usage` tells that of the answer so far."""
        ...

    def whole(self, job: Job, names: TokenNames) -> WholeWriter: ...


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
