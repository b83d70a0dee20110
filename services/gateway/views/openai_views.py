"""`/v1/chat/completions` and `/v1/completions`, whose bodies are the request that all views share."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from common.protocol.errors import PenstockError, RequestError
from services.gateway import bodies
from services.gateway.arguments import Notes
from services.gateway.bodies import KEEP_ALIVE, ChunkWriter, Kind, Usage
from services.gateway.job import Job
from services.gateway.json_slices import Steps
from services.gateway.logprobs import TokenNames
from services.gateway.parse import parse
from services.gateway.views.view import Parsed
from services.gateway.whole import WholeBody


class OpenAIWriters:
    def stream(self, job: Job, names: TokenNames, usage: Callable[[], Usage], *, sse: bool) -> ChunkWriter:
        return ChunkWriter(job.heading, names, usage, include_usage=job.include_usage, usage_so_far=job.usage_so_far, sse=sse)

    def whole(self, job: Job, names: TokenNames) -> WholeBody:
        return WholeBody(job.heading, names)


OPENAI_WRITERS = OpenAIWriters()


class OpenAIView(msgspec.Struct, frozen=True):
    kind: Kind
    id_prefix: str
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    keep_alive: bytes = KEEP_ALIVE

    def parse(self, body: bytes, *, max_prompt_tokens: int, notes: Notes) -> Steps[Parsed]:
        request = yield from parse(self.kind, body, max_prompt_tokens=max_prompt_tokens, notes=notes)
        return Parsed(request, OPENAI_WRITERS)

    def in_its_terms(self, error: RequestError) -> RequestError:
        return error

    def error_body(self, error: PenstockError) -> bytes:
        return bodies.failure_body(error)


CHAT = OpenAIView("chat", "chatcmpl-")
COMPLETION = OpenAIView("completion", "cmpl-")
