"""`/v1/responses`: OpenAI's Responses API, streamed and whole, without state. Pure.

See docs/decisions/0032-views.md for what `store` means here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from common.protocol.errors import PenstockError, RequestError
from services.gateway import bodies
from services.gateway.arguments import Notes
from services.gateway.bodies import Usage
from services.gateway.job import Job
from services.gateway.json_slices import Steps
from services.gateway.logprobs import TokenNames
from services.gateway.views.responses_answer import Envelope, ResponseStream, Scores, WholeResponse
from services.gateway.views.responses_body import ResponsesRequest, read_responses
from services.gateway.views.responses_chat import chat_of
from services.gateway.views.responses_tools import Callee, offered_tools
from services.gateway.views.terms import in_terms, renamed, terms
from services.gateway.views.view import Parsed

_FUNCTION = {"description": None, "parameters": None, "strict": False}
_TERMS = terms(
    (r"\bmax_completion_tokens\b", "max_output_tokens"),
    (r"\bresponse_format(\.json_schema)?\b", "text.format"),
    (r"(?<!\.)\breasoning_effort\b", "reasoning.effort"),
    (r"\.tool_calls\[\d+\]\.function\b", ""),
    (r"(tools\[\d+\])\.function\b", r"\1"),
    (r"\bmessages\b", "input"),
)


class ResponsesWriters:
    """`asked`: the request, without what it holds of the conversation. `callees`: see `Offered`."""

    def __init__(self, asked: ResponsesRequest, callees: Mapping[str, Callee]) -> None:
        self._asked = asked
        self._callees = callees

    def stream(self, job: Job, names: TokenNames, usage: Callable[[], Usage], *, sse: bool) -> ResponseStream:
        return ResponseStream(self._envelope(job), Scores.of(job, names), usage, sse=sse)

    def whole(self, job: Job, names: TokenNames) -> WholeResponse:
        return WholeResponse(self._envelope(job), Scores.of(job, names))

    def _envelope(self, job: Job) -> Envelope:
        head = {"id": job.shown_id, "object": "response", "created_at": job.created, "model": job.model}
        return Envelope(head, _echo(self._asked, job), self._callees)


def _echo(asked: ResponsesRequest, job: Job) -> dict[str, Any]:
    """What was asked for, as it is obeyed."""
    form = asked.text.format if asked.text is not None else None
    return {
        "background": False,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
        "store": False,
        "temperature": job.sampling.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": [{**_FUNCTION, **tool} if tool.get("type") == "function" else tool for tool in asked.tools or []],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": job.sampling.top_p if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "user": asked.user,
    }


class ResponsesView(msgspec.Struct, frozen=True):
    id_prefix: str = "resp_"
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    keep_alive: bytes = bodies.KEEP_ALIVE

    def parse(self, body: bytes, *, max_prompt_tokens: int, notes: Notes) -> Steps[Parsed]:
        notes.term = partial(renamed, names=_TERMS)
        asked = yield from read_responses(body, notes)
        try:
            offered = offered_tools(asked.tools or [], notes)
            chat = yield from chat_of(asked, offered, notes)
        except RequestError as error:
            raise self.in_its_terms(error) from error
        return Parsed(chat, ResponsesWriters(msgspec.structs.replace(asked, input=""), offered.callees))

    def in_its_terms(self, error: RequestError) -> RequestError:
        return in_terms(error, _TERMS)

    def error_body(self, error: PenstockError) -> bytes:
        return bodies.failure_body(error)

    def count_body(self, num_tokens: int) -> bytes:
        return b'{"object":"response.input_tokens","input_tokens":%d}' % num_tokens


RESPONSES = ResponsesView()
