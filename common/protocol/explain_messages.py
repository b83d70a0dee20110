"""What a gateway asks workers about one request, for `penstock explain`, and what it tells clients.

    client  → every gateway   `penstock.v1.explain`: {"request": "<id>"}, answered with an Explanation as JSON, or with an error
    gateway → worker          Explain               answered by Explained

Nothing here holds text or token ids: names, times, numbers of tokens and bytes, error codes.
"""

from __future__ import annotations

import msgspec

from common.protocol.handles import WorkerRef


class RequestContext(msgspec.Struct, frozen=True, array_like=True):
    """The request that a message between workers is about, for what its receiver remembers of it. `request`: its name in logs;
    empty: there is none, or it is not told. `trace`: the traceparent of the sender's span; empty: it is not traced."""

    request: str = ""
    attempt: int = 0
    trace: str = ""


class WorkerEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that took from `began_at` to `ended_at`, in seconds of the worker's clock.

    `name` is `pull` (KV from a prefill worker), `prefix` (KV from a kvstore), `shared prefix` (KV that this worker computed for
    another request meanwhile, from when this one could have run), `chunk`, `part` (KV told to the decode worker before KvReady;
    there, from when it was heard until it had been copied), `first step`, `hand-off`, `preempted` or `speculation`; of a
    kvstore `lookup`, `disk read`, `stage` (for a reader of another host), `store` or `write-back`; of a draft worker
    `drafting`. `num_tokens`: computed by a step, or copied. `peer`: the worker at the other side. `error`: a code.
    `num_bytes`: copied. `facts`: further numbers by name.
    """

    name: str
    began_at: float
    ended_at: float
    num_tokens: int = 0
    peer: str = ""
    error: str = ""
    num_bytes: int = 0
    facts: tuple[tuple[str, int], ...] = ()


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt of a request on one worker. Times are seconds of the worker's clock, 0.0 for what did not happen.

    `local_tokens`: of its prompt, found in this worker's own prefix cache. `cached_tokens`: found there or in a kvstore.
    `output_tokens`: generated so far, by earlier attempts too. `error`: the code with which the worker gave the attempt up.
    `recomputed_tokens`: computed here although their KV had been computed before, here or elsewhere. `peers`: kvstores and
    draft workers that it asked, which may remember more. A kvstore or a draft worker tells `attempt`, `admitted_at` and
    `events` alone.
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
    recomputed_tokens: int = 0
    peers: list[WorkerRef] = []


class Explain(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """gateway → worker: what do you remember of this request?"""

    request: str


class Explained(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """worker → gateway: the answer to Explain; no records for a request that is unknown or was forgotten.

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
    """One line of a timeline. `at_ms`: since the request's arrival. `service`: the role of the process.

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
