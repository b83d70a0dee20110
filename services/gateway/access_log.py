"""One line in the log per answered request, over HTTP, over NATS and of a batch; never a word of its text.

    request_answered request=chatcmpl-… client_id=… edge=http path=/v1/chat/completions status=200 code= tenant=acme model=…
                     stream=True choices=1 finish=stop prompt_tokens=12 completion_tokens=80 cached_tokens=0 ttft_s=0.031
                     duration_s=0.912

`request` is the id inside Penstock, under which workers log; `client_id` is what the client called it; `tenant` is left
out where it is nobody's in particular. `code` is the error's, if it ended with one, and `status` what HTTP calls that. A client
that left is `client_closed_request`, 499.
"""

from __future__ import annotations

import time
from typing import Literal

from common.protocol.errors import Cancelled, DeadlineExceeded
from common.runtime import logs
from services.gateway.answer import Answer
from services.gateway.bodies import Usage
from services.gateway.generation import Arrival
from services.gateway.metrics import EdgeMetrics
from services.gateway.server_span import ServerSpan
from services.gateway.tenants import Visit
from services.gateway.usage import UsageEvent
from services.gateway.vector_answer import VectorAnswer

log = logs.get_fast("access")

GONE_CODE, GONE_STATUS = "client_closed_request", 499
_ENDED_BY_CLIENT = (GONE_CODE, Cancelled.code, DeadlineExceeded.code)
"""What a client can end a request with whose prompt is being computed."""


class AccessRecord:
    """A request from its arrival to `close`. `visit`: a tenant's, which ends with it, and so does `span`."""

    def __init__(
        self,
        edge: Literal["http", "nats", "batch"],
        path: str,
        request: str,
        metrics: EdgeMetrics,
        *,
        enabled: bool,
        span: ServerSpan | None = None,
    ) -> None:
        self.client_id = ""
        self.answer: Answer | VectorAnswer | None = None
        self.visit: Visit | None = None
        self._edge = edge
        self._path = path
        self._request = request
        self._metrics = metrics
        self._enabled = enabled
        self._span = span
        self._began_at = time.monotonic()

    @property
    def arrival(self) -> Arrival:
        """What its answer is made with."""
        return Arrival(self.client_id, self._began_at, "" if self._span is None else self._span.traceparent)

    def close(self, status: int, code: str = "") -> None:
        """Count and log the request; `code` is empty for one that was answered to its end."""
        if self.visit is not None:
            self._leave(self.visit, status, code)
        if code:
            self._metrics.failed(self._edge, code)
        if self._span is not None:
            self._span.end(
                request=self._request,
                client_id=self.client_id,
                edge=self._edge,
                path=self._path,
                status=status,
                code=code,
                tenant="" if self.visit is None else self.visit.tenant.name,
                answer=self.answer,
            )
        if not self._enabled:
            return
        fields: dict[str, object] = {} if self.visit is None else {"tenant": self.visit.tenant.name}
        if (answer := self.answer) is not None:
            usage = answer.usage()
            fields |= {
                "model": answer.job.model,
                "stream": answer.job.stream,
                "choices": answer.job.num_choices,
                "finish": answer.finish,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
                "ttft_s": None if answer.ttft_s is None else round(answer.ttft_s, 4),
            }
        log.info(
            "request_answered",
            request=self._request,
            client_id=self.client_id,
            edge=self._edge,
            path=self._path,
            status=status,
            code=code,
            **fields,
            duration_s=round(time.monotonic() - self._began_at, 4),
        )

    def _leave(self, visit: Visit, status: int, code: str) -> None:
        """A tenant's request ends. One that we failed before its first token took nothing; one that its client ended took its
        prompt, or prompts would be free for those who never wait for an answer."""
        now = time.monotonic()
        usage, model = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0), ""
        if self.answer is not None:
            model = self.answer.job.model
            found = self.answer.usage()
            if found.completion_tokens or not code or code in _ENDED_BY_CLIENT:
                usage = found
        visit.leave(usage.prompt_tokens + usage.completion_tokens, now)
        visit.tenant.on_usage(
            UsageEvent(
                tenant=visit.tenant.name,
                request=self._request,
                client_id=self.client_id,
                edge=self._edge,
                model=model,
                status=status,
                code=code,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                at=round(time.time(), 3),
                duration_s=round(now - self._began_at, 4),
            )
        )
