"""The span of a client's request, from its arrival at an edge to its end, in the terms of OpenTelemetry's GenAI conventions.

No text of a prompt or an answer is in it, nor any header but the trace's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from common.runtime.spans import Begun, Fact, Span
from common.runtime.tracing import Tracing
from services.gateway.answer import Answer
from services.gateway.vector_answer import VectorAnswer

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_CHARS = 512
_OPERATIONS = {"completion": "text_completion"}


class ServerSpan:
    """One request's. `traceparent` is what its workers' spans belong to."""

    def __init__(self, tracing: Tracing, begun: Begun) -> None:
        self.traceparent = begun.own
        self._tracing = tracing
        self._begun = begun
        self._began_at = time.monotonic()

    def end(
        self,
        *,
        request: str,
        client_id: str,
        edge: str,
        path: str,
        status: int,
        code: str,
        tenant: str,
        answer: Answer | VectorAnswer | None,
    ) -> None:
        """Export it. The arguments are those of the access log's line."""
        name, facts = f"{edge} {path}", {}
        if answer is not None:
            name, facts = _told_by(answer)
        facts |= {"gen_ai.provider.name": "penstock", "penstock.request.id": request, "gen_ai.response.id": client_id}
        if edge == "http":
            facts |= {"http.request.method": "POST", "url.path": path, "http.response.status_code": status}
        else:
            facts |= {"messaging.system": "nats", "messaging.destination.name": path}
        if tenant:
            facts["penstock.tenant"] = tenant
        now, begun = time.monotonic(), self._begun
        span = Span(
            name=name,
            parent=begun.parent,
            own=begun.own,
            began_at=self._began_at,
            ended_at=now,
            kind="server",
            facts=facts,
            error=code,
            state=begun.state,
        )
        self._tracing.record((span,), now)


def begin_span(tracing: Tracing, header: Callable[[str], str | None]) -> ServerSpan | None:
    """Begin the span of a request whose headers `header` finds. None: there are no traces, or it is not sampled."""
    if not tracing.enabled:
        return None
    state = header(TRACESTATE) or ""
    begun = tracing.begin(header(TRACEPARENT) or "", state if len(state) <= MAX_STATE_CHARS else "")
    return None if begun is None else ServerSpan(tracing, begun)


def _told_by(answer: Answer | VectorAnswer) -> tuple[str, dict[str, Fact]]:
    """What an answer tells of its request: the span's name, and its facts."""
    job, usage = answer.job, answer.usage()
    operation = _OPERATIONS.get(answer.job.kind, "chat") if isinstance(answer, Answer) else "embeddings"
    facts: dict[str, Fact] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": job.model,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.request.choice.count": job.num_choices,
        "gen_ai.request.stream": job.stream,
    }
    if isinstance(answer, Answer):
        facts["gen_ai.request.max_tokens"] = answer.job.sampling.max_tokens
        facts["gen_ai.response.finish_reasons"] = answer.finishes
    if answer.ttft_s is not None:
        facts["penstock.time_to_first_token_s"] = round(answer.ttft_s, 6)
    return f"{operation} {job.model}", facts
