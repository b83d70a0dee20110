"""`/v1/messages`: Anthropic's Messages API, streamed and whole. Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from common.protocol.errors import PenstockError, RequestError
from services.gateway.arguments import Notes
from services.gateway.bodies import Usage
from services.gateway.job import Job
from services.gateway.json_slices import Steps
from services.gateway.logprobs import TokenNames
from services.gateway.views import messages_answer
from services.gateway.views.messages_answer import MessageHead, MessageStream, WholeMessage
from services.gateway.views.messages_body import read_messages
from services.gateway.views.messages_chat import chat_of
from services.gateway.views.terms import in_terms, renamed, terms
from services.gateway.views.view import Parsed

_TERMS = terms(
    (r"\bresponse_format(\.json_schema)?\b", "output_config.format"),
    (r"\breasoning_effort\b", "output_config.effort"),
    (r"\bcontinue_final_message\b", "messages"),
    (r"\benable_thinking\b", "thinking"),
    (r"\.tool_calls\[\d+\]\.function\b", ""),
    (r"(tools\[\d+\])\.function\b", r"\1"),
    (r"(tools\[\d+\])\.parameters\b", r"\1.input_schema"),
)


class MessagesWriters:
    def stream(self, job: Job, names: TokenNames, usage: Callable[[], Usage], *, sse: bool) -> MessageStream:
        return MessageStream(_head(job), usage, sse=sse)

    def whole(self, job: Job, names: TokenNames) -> WholeMessage:
        return WholeMessage(_head(job))


def _head(job: Job) -> MessageHead:
    return MessageHead(job.shown_id, job.model, "model_context_window_exceeded" if job.fills_context else "max_tokens")


MESSAGES_WRITERS = MessagesWriters()


class MessagesView(msgspec.Struct, frozen=True):
    """`counts`: bodies are those of `/v1/messages/count_tokens`."""

    id_prefix: str = "msg_"
    id_headers: tuple[bytes, ...] = (b"x-request-id", b"request-id")
    keep_alive: bytes = messages_answer.PING
    counts: bool = False

    def parse(self, body: bytes, *, max_prompt_tokens: int, notes: Notes) -> Steps[Parsed]:
        notes.term = partial(renamed, names=_TERMS)
        asked = yield from read_messages(body, notes)
        try:
            chat = yield from chat_of(asked, notes, counts=self.counts)
        except RequestError as error:
            raise self.in_its_terms(error) from error
        return Parsed(chat, MESSAGES_WRITERS)

    def in_its_terms(self, error: RequestError) -> RequestError:
        return in_terms(error, _TERMS)

    def error_body(self, error: PenstockError) -> bytes:
        return messages_answer.error_body(error)

    def count_body(self, num_tokens: int) -> bytes:
        return b'{"input_tokens":%d}' % num_tokens


MESSAGES = MessagesView()
MESSAGES_COUNT = MessagesView(counts=True)
