"""One route of a gateway's HTTP port as it is described, and what descriptions share."""

from __future__ import annotations

from typing import Literal

import msgspec

from common.protocol.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EmptyPrompt,
    Forbidden,
    GatewayBusy,
    HostNotAllowed,
    InternalError,
    InvalidLogits,
    InvalidParameter,
    NoWorkers,
    OriginNotAllowed,
    Overloaded,
    PayloadTooLarge,
    PenstockError,
    RateLimited,
    ShuttingDown,
    UnknownModel,
    WorkersDied,
)
from services.gateway.api_answers import STRING, Schema, reference
from services.gateway.http_body import BodyTimeout, WrongContentType
from services.gateway.http_io import Unauthorized

JSON = "application/json"
EVENTS = "text/event-stream"

Errors = tuple[type[PenstockError], ...]

EVERYWHERE: Errors = (OriginNotAllowed, HostNotAllowed)
READS_A_BODY: Errors = (
    InvalidParameter,
    ContextLengthExceeded,
    UnknownModel,
    BodyTimeout,
    PayloadTooLarge,
    WrongContentType,
    Overloaded,
    RateLimited,
    InternalError,
)
GENERATES: Errors = (
    *READS_A_BODY,
    EmptyPrompt,
    InvalidLogits,
    WorkersDied,
    NoWorkers,
    GatewayBusy,
    ShuttingDown,
    DeadlineExceeded,
)


class Parameter(msgspec.Struct, frozen=True):
    """One in the path, the query or the headers."""

    name: str
    place: Literal["path", "query", "header"]
    description: str
    schema: Schema = msgspec.field(default_factory=lambda: STRING)


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """`answers`: for a status, the schema by media type; none for an empty body. `keyed`: it asks for the API key.
    `form`: the schema of a multipart body. `anthropic`: errors have Anthropic's form."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    tag: str
    answers: dict[int, dict[str, Schema]]
    body: type[msgspec.Struct] | None = None
    form: Schema | None = None
    anthropic: bool = False
    parameters: tuple[Parameter, ...] = ()
    errors: Errors = ()
    keyed: bool = False

    @property
    def all_errors(self) -> Errors:
        return (*self.errors, *((Unauthorized, Forbidden) if self.keyed else ()), *EVERYWHERE)


DEADLINE = Parameter(
    "Penstock-Deadline-Ms",
    "header",
    "Milliseconds that the request may take; the shorter of it and `timeout` holds.",
    {"type": "string", "pattern": "^[0-9]{1,12}$"},
)
REQUEST_ID = Parameter("X-Request-Id", "header", "Comes back with the answer, if it is one word of 1 to 128 characters.")
TEXT: dict[str, Schema] = {"text/plain": STRING}
METRICS: dict[str, Schema] = {**TEXT, "application/openmetrics-text": STRING}
PAGE: dict[str, Schema] = {"text/html": STRING}
DOCUMENT: dict[str, Schema] = {JSON: {"type": "object"}}


def answer(name: str) -> dict[int, dict[str, Schema]]:
    return {200: {JSON: reference(name)}}


def stream(name: str, chunk: str) -> dict[int, dict[str, Schema]]:
    events = {
        "description": f"With `stream`: events whose data is a {chunk}, then `[DONE]`; an Error ends a stream that fails."
    }
    return {200: {JSON: reference(name), EVENTS: events}}
