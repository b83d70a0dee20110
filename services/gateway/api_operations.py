"""What a gateway's HTTP port serves, one entry per route and method: what goes in, what comes out, and every error.

A test holds this table to the routes of `http.create_app`, and the errors to the tree in `common/protocol/errors.py`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from common.protocol.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EmptyPrompt,
    GatewayBusy,
    HostNotAllowed,
    InternalError,
    InvalidParameter,
    NoWorkers,
    OriginNotAllowed,
    Overloaded,
    PayloadTooLarge,
    PenstockError,
    ShuttingDown,
    UnknownModel,
    WorkersDied,
)
from services.gateway.api_answers import STRING, Schema, reference
from services.gateway.dashboard import NotFound
from services.gateway.http_body import BodyTimeout, WrongContentType
from services.gateway.http_io import Unauthorized
from services.gateway.openai import ChatRequest, CompletionRequest
from services.gateway.token_bodies import DetokenizeRequest, TokenizeRequest

JSON = "application/json"
EVENTS = "text/event-stream"

Errors = tuple[type[PenstockError], ...]

EVERYWHERE: Errors = (OriginNotAllowed, HostNotAllowed)
_READS_A_BODY: Errors = (
    InvalidParameter,
    ContextLengthExceeded,
    UnknownModel,
    BodyTimeout,
    PayloadTooLarge,
    WrongContentType,
    Overloaded,
    InternalError,
)
_GENERATES: Errors = (
    *_READS_A_BODY,
    EmptyPrompt,
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
    """`answers`: for a status, the schema by media type; none for an empty body. `keyed`: it asks for the API key."""

    method: Literal["GET", "POST"]
    path: str
    summary: str
    tag: str
    answers: dict[int, dict[str, Schema]]
    body: type[msgspec.Struct] | None = None
    parameters: tuple[Parameter, ...] = ()
    errors: Errors = ()
    keyed: bool = False

    @property
    def all_errors(self) -> Errors:
        return (*self.errors, *((Unauthorized,) if self.keyed else ()), *EVERYWHERE)


_DEADLINE = Parameter(
    "Penstock-Deadline-Ms",
    "header",
    "Milliseconds that the request may take; the shorter of it and `timeout` holds.",
    {"type": "string", "pattern": "^[0-9]{1,12}$"},
)
_REQUEST_ID = Parameter("X-Request-Id", "header", "Comes back with the answer, if it is one word of 1 to 128 characters.")
_TEXT: dict[str, Schema] = {"text/plain": STRING}
_PAGE: dict[str, Schema] = {"text/html": STRING}
_DOCUMENT: dict[str, Schema] = {JSON: {"type": "object"}}


def _answer(name: str) -> dict[int, dict[str, Schema]]:
    return {200: {JSON: reference(name)}}


def _stream(name: str, chunk: str) -> dict[int, dict[str, Schema]]:
    events = {
        "description": f"With `stream`: events whose data is a {chunk}, then `[DONE]`; an Error ends a stream that fails."
    }
    return {200: {JSON: reference(name), EVENTS: events}}


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a conversation.",
        tag="generation",
        body=ChatRequest,
        parameters=(_DEADLINE, _REQUEST_ID),
        answers=_stream("ChatCompletion", "ChatCompletionChunk"),
        errors=_GENERATES,
        keyed=True,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Continue one or several prompts.",
        tag="generation",
        body=CompletionRequest,
        parameters=(_DEADLINE, _REQUEST_ID),
        answers=_stream("Completion", "Completion"),
        errors=_GENERATES,
        keyed=True,
    ),
    Operation(
        method="GET",
        path="/v1/models",
        summary="List every name that a model is served under.",
        tag="models",
        answers=_answer("ModelList"),
        keyed=True,
    ),
    Operation(
        method="GET",
        path="/v1/models/{model}",
        summary="Describe one model.",
        tag="models",
        parameters=(Parameter("model", "path", "A name of a model, or an alias; it may hold slashes."),),
        answers=_answer("Model"),
        errors=(UnknownModel, NotFound),
        keyed=True,
    ),
    Operation(
        method="POST",
        path="/tokenize",
        summary="Turn a prompt or a conversation into tokens, and count them.",
        tag="tokens",
        body=TokenizeRequest,
        parameters=(_REQUEST_ID,),
        answers=_answer("TokenizeAnswer"),
        errors=_READS_A_BODY,
        keyed=True,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        summary="Turn tokens into text.",
        tag="tokens",
        body=DetokenizeRequest,
        parameters=(_REQUEST_ID,),
        answers=_answer("DetokenizeAnswer"),
        errors=_READS_A_BODY,
        keyed=True,
    ),
    Operation(
        method="GET",
        path="/tokenizer_info",
        summary="Tell a model's chat template and special tokens.",
        tag="tokens",
        parameters=(Parameter("model", "query", "Needed where several models are served."),),
        answers=_answer("TokenizerInfo"),
        errors=(InvalidParameter, UnknownModel),
        keyed=True,
    ),
    Operation(
        method="GET",
        path="/health",
        summary="Whether the process answers.",
        tag="operations",
        answers=_answer("Health"),
    ),
    Operation(
        method="GET",
        path="/ready",
        summary="Whether a request would be answered now.",
        tag="operations",
        parameters=(Parameter("model", "query", "Of this model; by default, of any."),),
        answers={200: _TEXT, 503: _TEXT},
        errors=(UnknownModel,),
    ),
    Operation(
        method="GET",
        path="/ping",
        summary="The status of `/ready`, as SageMaker asks for it.",
        tag="operations",
        answers={200: {}, 503: {}},
    ),
    Operation(
        method="POST",
        path="/ping",
        summary="The status of `/ready`, as SageMaker asks for it.",
        tag="operations",
        answers={200: {}, 503: {}},
    ),
    Operation(method="GET", path="/version", summary="Which Penstock this is.", tag="operations", answers=_answer("Version")),
    Operation(method="GET", path="/metrics", summary="Prometheus's text.", tag="operations", answers={200: _TEXT}),
    Operation(method="GET", path="/openapi.json", summary="This document.", tag="operations", answers={200: _DOCUMENT}),
    Operation(method="GET", path="/docs", summary="This document as a page.", tag="operations", answers={200: _PAGE, 304: {}}),
    Operation(method="GET", path="/", summary="The dashboard's page.", tag="dashboard", answers={200: _PAGE, 304: {}}),
    Operation(
        method="GET",
        path="/dashboard/events",
        summary="What the dashboard shows, live.",
        tag="dashboard",
        parameters=(Parameter("search", "query", "Which workers are listed."),),
        answers={200: {EVENTS: STRING}},
        errors=(Overloaded,),
        keyed=True,
    ),
    Operation(
        method="GET",
        path="/dashboard/requests/{name}",
        summary="What became of one request.",
        tag="dashboard",
        parameters=(Parameter("name", "path", "The request's id up to its 8th character, without what is before the dash."),),
        answers=_answer("RequestRow"),
        errors=(NotFound,),
        keyed=True,
    ),
    Operation(
        method="GET",
        path="/sd",
        summary="Where Prometheus finds everybody's metrics.",
        tag="operations",
        answers=_answer("Targets"),
        keyed=True,
    ),
)
