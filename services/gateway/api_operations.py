"""What a gateway's HTTP port serves, one entry per route and method: what goes in, what comes out, and every error.

A test holds this table to the routes of `http.create_app`, and the errors to the tree in `common/protocol/errors.py`.
"""

from __future__ import annotations

from common.protocol.errors import InvalidParameter, Overloaded, UnknownModel
from services.gateway.api_answers import STRING, reference
from services.gateway.api_batches import BATCH_OPERATIONS
from services.gateway.api_operation import (
    DEADLINE,
    DOCUMENT,
    EVENTS,
    GENERATES,
    JSON,
    METRICS,
    PAGE,
    READS_A_BODY,
    REQUEST_ID,
    TEXT,
    Operation,
    Parameter,
    answer,
    stream,
)
from services.gateway.dashboard import NotFound
from services.gateway.openai import ChatRequest, CompletionRequest
from services.gateway.token_bodies import DetokenizeRequest, TokenizeRequest
from services.gateway.vectors import EmbeddingRequest, ScoreRequest
from services.gateway.views.messages_body import MessagesRequest
from services.gateway.views.responses_body import ResponsesRequest

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a conversation.",
        tag="generation",
        body=ChatRequest,
        parameters=(DEADLINE, REQUEST_ID),
        answers=stream("ChatCompletion", "ChatCompletionChunk"),
        errors=GENERATES,
        keyed=True,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Continue one or several prompts.",
        tag="generation",
        body=CompletionRequest,
        parameters=(DEADLINE, REQUEST_ID),
        answers=stream("Completion", "Completion"),
        errors=GENERATES,
        keyed=True,
    ),
    Operation(
        method="POST",
        path="/v1/responses",
        summary="Answer a conversation, as OpenAI's Responses API does. Nothing is stored.",
        tag="generation",
        body=ResponsesRequest,
        parameters=(DEADLINE, REQUEST_ID),
        answers={
            200: {
                JSON: reference("Response"),
                EVENTS: {"description": "With `stream`: the API's events, each a ResponseEvent."},
            }
        },
        errors=GENERATES,
        keyed=True,
    ),
    Operation(
        method="POST",
        path="/v1/responses/input_tokens",
        summary="Count the tokens of a prompt for `/v1/responses`.",
        tag="tokens",
        body=ResponsesRequest,
        answers=answer("ResponseInputTokens"),
        errors=READS_A_BODY,
        keyed=True,
    ),
    Operation(
        method="POST",
        path="/v1/messages",
        summary="Answer a conversation, as Anthropic's Messages API does.",
        tag="generation",
        body=MessagesRequest,
        anthropic=True,
        parameters=(DEADLINE, REQUEST_ID),
        answers={
            200: {
                JSON: reference("MessageAnswer"),
                EVENTS: {"description": "With `stream`: the API's events, each a MessageEvent."},
            }
        },
        errors=GENERATES,
        keyed=True,
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        summary="Count the tokens of a prompt for `/v1/messages`.",
        tag="tokens",
        body=MessagesRequest,
        anthropic=True,
        answers=answer("MessageTokens"),
        errors=READS_A_BODY,
        keyed=True,
    ),
    Operation(
        method="POST",
        path="/v1/embeddings",
        summary="Turn texts or token ids into vectors.",
        tag="vectors",
        body=EmbeddingRequest,
        parameters=(DEADLINE, REQUEST_ID),
        answers=answer("Embeddings"),
        errors=GENERATES,
        keyed=True,
    ),
    *(
        Operation(
            method="POST",
            path=path,
            summary="Tell how alike texts are.",
            tag="vectors",
            body=ScoreRequest,
            parameters=(DEADLINE, REQUEST_ID),
            answers=answer("Scores"),
            errors=GENERATES,
            keyed=True,
        )
        for path in ("/v1/score", "/score")
    ),
    *BATCH_OPERATIONS,
    Operation(
        method="GET",
        path="/v1/models",
        summary="List every name that a model is served under.",
        tag="models",
        answers=answer("ModelList"),
        keyed=True,
    ),
    Operation(
        method="GET",
        path="/v1/models/{model}",
        summary="Describe one model.",
        tag="models",
        parameters=(Parameter("model", "path", "A name of a model, or an alias; it may hold slashes."),),
        answers=answer("Model"),
        errors=(UnknownModel, NotFound),
        keyed=True,
    ),
    Operation(
        method="POST",
        path="/tokenize",
        summary="Turn a prompt or a conversation into tokens, and count them.",
        tag="tokens",
        body=TokenizeRequest,
        parameters=(REQUEST_ID,),
        answers=answer("TokenizeAnswer"),
        errors=READS_A_BODY,
        keyed=True,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        summary="Turn tokens into text.",
        tag="tokens",
        body=DetokenizeRequest,
        parameters=(REQUEST_ID,),
        answers=answer("DetokenizeAnswer"),
        errors=READS_A_BODY,
        keyed=True,
    ),
    Operation(
        method="GET",
        path="/tokenizer_info",
        summary="Tell a model's chat template and special tokens.",
        tag="tokens",
        parameters=(Parameter("model", "query", "Needed where several models are served."),),
        answers=answer("TokenizerInfo"),
        errors=(InvalidParameter, UnknownModel),
        keyed=True,
    ),
    Operation(
        method="GET",
        path="/health",
        summary="Whether the process answers.",
        tag="operations",
        answers=answer("Health"),
    ),
    Operation(
        method="GET",
        path="/ready",
        summary="Whether a request would be answered now.",
        tag="operations",
        parameters=(Parameter("model", "query", "Of this model; by default, of any."),),
        answers={200: TEXT, 503: TEXT},
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
    Operation(method="GET", path="/version", summary="Which Penstock this is.", tag="operations", answers=answer("Version")),
    Operation(
        method="GET",
        path="/metrics",
        summary="Metrics in Prometheus's text format, or in OpenMetrics where that is asked for.",
        tag="operations",
        answers={200: METRICS},
    ),
    Operation(method="GET", path="/openapi.json", summary="This document.", tag="operations", answers={200: DOCUMENT}),
    Operation(method="GET", path="/docs", summary="This document as a page.", tag="operations", answers={200: PAGE, 304: {}}),
    Operation(method="GET", path="/", summary="The dashboard's page.", tag="dashboard", answers={200: PAGE, 304: {}}),
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
        answers=answer("RequestRow"),
        errors=(NotFound,),
        keyed=True,
    ),
    Operation(
        method="GET",
        path="/sd",
        summary="Where Prometheus finds everybody's metrics.",
        tag="operations",
        answers=answer("Targets"),
        keyed=True,
    ),
)
