"""What a gateway asks workers about one request, for `penstock explain`, and what it tells clients.

    client  → every gateway   `penstock.v1.explain`: {"request": "<id>"}, answered with an Explanation as JSON, or with an error
    gateway → worker          Explain               answered by Explained

Nothing here holds text or token ids: names, times, numbers of tokens and bytes, error codes.
"""

from __future__ import annotations

import msgspec

from common.protocol.handles import WorkerRef


class WorkerEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that took from `began_at` to `ended_at`, in seconds of the worker's clock.

    `name` is `pull` (KV from a prefill worker), `prefix` (KV from a kvstore), `chunk`, `first step` or `hand-off`.
    `num_tokens`: computed by a step, or copied. `peer`: the worker at the other side. `error`: a code. `num_bytes`: copied.
    """

    name: str
    began_at: float
    ended_at: float
    num_tokens: int = 0
    peer: str = ""
    error: str = ""
    num_bytes: int = 0


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt of a request on one worker. Times are seconds of the worker's clock, 0.0 for what did not happen.

    `local_tokens`: of its prompt, found in this worker's own prefix cache. `cached_tokens`: found there or in a kvstore.
    `output_tokens`: generated so far, by earlier attempts too. `error`: the code with which the worker gave the attempt up.
    """

    attempt: int
    admitted_at: float
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    left_at: float = 0.0
    prompt_tokens: int = 0
    local_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    events: list[WorkerEvent] = []


class Explain(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """gateway → prefill or decode: what do you remember of this request?"""

    request: str


class Explained(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """prefill or decode → gateway: the answer to Explain; no records for a request that is unknown or was forgotten.

    `now`: the time on the clock of the records, for gateways on another machine.
    """

    worker: WorkerRef
    now: float
    records: list[WorkerRecord] = []


ExplainMessage = Explain | Explained


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was compared for one part of a request: `prefill`, `decode`, or both on one worker (`direct`).

    `cost_ms`: what the router expected it to cost. `cached_tokens`: of the prompt, expected in its cache. `ttft_ms`: after how
    long it expected the first token; 0 for the part of the answer.
    """

    part: str
    worker: str
    cost_ms: float
    cached_tokens: int = 0
    chosen: bool = False
    ttft_ms: float = 0.0


class ExplainedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a timeline. `at_ms`: since the request's arrival. `service`: `gateway`, `prefill` or `decode`.

    `worker`: the id of the process. `facts`: numbers and names that belong to the event. `candidates`: of `routed`, the workers
    that were compared.
    """

    at_ms: float
    event: str
    service: str
    worker: str
    attempt: int = 0
    duration_ms: float | None = None
    facts: dict[str, str | int | float] = {}
    candidates: list[Candidate] = []


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of one request (of one choice, where several were asked for), oldest event first.

    `id` names it inside Penstock, `shown_id` to its client. `received_at`: seconds since 1970. `duration_ms`: until its end, or
    until now while it runs; `finish` is empty then. `code`: of the error that it ended with. `silent`: workers that took part
    and did not tell what they know, with the reason.
    """

    id: str
    shown_id: str
    model: str
    gateway: str
    received_at: float
    state: str
    duration_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token_ms: float | None = None
    finish: str = ""
    code: str = ""
    tenant: str = ""
    events: list[ExplainedEvent] = []
    silent: dict[str, str] = {}


class Explanations(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question over NATS or HTTP: one Explanation for each choice of the request."""

    requests: list[Explanation]
