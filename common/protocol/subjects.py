"""Every subject and queue group, as functions. No other file spells a subject.

    penstock.v1.chat.<model-slug>           client → a gateway of this model (queue group): OpenAI chat JSON
    penstock.v1.completions.<model-slug>    client → a gateway of this model (queue group): OpenAI completion JSON
    penstock.v1.responses.<model-slug>      client → a gateway of this model (queue group): OpenAI responses JSON
    penstock.v1.messages.<model-slug>       client → a gateway of this model (queue group): Anthropic messages JSON
    penstock.v1.embeddings.<model-slug>     client → a gateway of this model (queue group): OpenAI embeddings JSON
    penstock.v1.score.<model-slug>          client → a gateway of this model (queue group): vLLM's /v1/score JSON
    penstock.v1.input_tokens.<model-slug>   client → a gateway of this model (queue group): OpenAI responses JSON, for a count
    penstock.v1.count_tokens.<model-slug>   client → a gateway of this model (queue group): Anthropic messages JSON, for a count
    penstock.v1.tokenize.<model-slug>       client → a gateway of this model (queue group): vLLM's /tokenize JSON
    penstock.v1.detokenize.<model-slug>     client → a gateway of this model (queue group): vLLM's /detokenize JSON
                                            (the slug of the model's name, or of one of its aliases)
    penstock.v1.cancel.<request-id>         client → every gateway, with the request's inbox as reply subject
    penstock.v1.explain                     client → every gateway: {"request": "<id>"}; whoever holds it tells its timeline
    penstock.v1.batch.<model-slug>          client → a gateway of this model (queue group): one line of a batch, to be kept
    penstock.v1.result.<line-id>            client → any gateway (queue group): what became of a line
    penstock.v1.int.batch.…                 a gateway → what is kept of files and batches (JetStream)
    penstock.v1.t.<tenant>.<rest>           a tenant's, below a subject of its own: `t.acme.chat.<model-slug>`,
                                            `t.acme.cancel.<request-id>`, all but batch and result; answered on inboxes of
                                            its own (`_INBOX.acme.…`)
    penstock.v1.usage.<tenant>              a gateway → whoever listens: what a request of the tenant's took, as JSON
    penstock.v1.int.inbox.<role>.<worker>   anyone inside → one worker's mailbox
    penstock.v1.int.presence.<role>.<worker>  a worker's heartbeat
    penstock.v1.int.kv.<role>.<worker>      a prefill or decode worker → every gateway: what its prefix cache holds
    penstock.v1.int.reply.<role>.<connection>.<n>  an answer to one request of one connection

A gateway listens to the subjects of its own models only, one for each name, so gateways of several models share a bus, and
several of one model share its load. A request for a model that nobody serves is answered by the server at once: no responders,
an empty message with `Status: 503`. `$SRV.INFO` lists the subjects and queue groups that each gateway listens to, `$SRV.STATS`
what came there.

Names that differ may have the same slug (`Org/Model` and `org-model`), and a name may mean another model elsewhere. Gateways
for two such names can't share a bus: the one that started later ends with a line that names both.

A tenant's permissions (`common/runtime/nats_access.py`) allow its own subjects and inboxes, and nothing else.
"""

from __future__ import annotations

import hashlib
import re

from common.protocol.errors import InvalidParameter

ROOT = "penstock.v1"
INTERNAL = f"{ROOT}.int"
TENANTS = f"{ROOT}.t"
_KEPT = f"{INTERNAL}.batch"
GATEWAY_QUEUE = "penstock-gateway"

RECORDS, FILES, LINES, RESULTS = "PENSTOCK_RECORDS", "PENSTOCK_FILES", "PENSTOCK_LINES", "PENSTOCK_RESULTS"
"""Streams: what files and batches are, files' bytes, lines that wait for an answer, and answers."""
STREAMS = (RECORDS, FILES, LINES, RESULTS)

VIEWS = (
    "chat",
    "completions",
    "responses",
    "messages",
    "embeddings",
    "score",
    "input_tokens",
    "count_tokens",
    "tokenize",
    "detokenize",
)
"""Kinds of requests that are answered at once, each with a subject for each model."""

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")
_CLIENT_INBOX = re.compile(rf"{re.escape(INTERNAL)}\.reply\.[A-Za-z0-9_-]{{1,128}}-inbox\.[A-Za-z0-9_-]{{1,128}}")


def token(value: str, *, what: str = "id") -> str:
    """Return `value`, which can be one token of a subject.

    :raises InvalidParameter: if it holds a wildcard, a dot, white space, or is empty or too long.
    """
    if not _TOKEN.fullmatch(value):
        raise InvalidParameter(f"{what} must be 1 to 128 characters of A-Z a-z 0-9 _ -", param=what)
    return value


def slug(model: str) -> str:
    """Return a model's name as a subject token: `HuggingFaceTB/SmolLM2-135M` → `huggingfacetb-smollm2-135m`.

    Letters beyond ASCII have no place in it; a digest of the name then tells such names apart: `größe-7b` → `gr-e-7b-5b31a1e0`.
    """
    readable = re.sub(r"[^a-z0-9_-]+", "-", model.lower()).strip("-")
    if any(character.isalnum() and not character.isascii() for character in model):
        readable = f"{readable[:119]}-{hashlib.blake2b(model.encode(), digest_size=4).hexdigest()}".lstrip("-")
    return readable[:128] or "model"


def _of_model(view: str, model_slug: str) -> str:
    return f"{ROOT}.{view}.{token(model_slug, what='model')}"


def chat(model_slug: str) -> str:
    return _of_model("chat", model_slug)


def completions(model_slug: str) -> str:
    return _of_model("completions", model_slug)


def responses(model_slug: str) -> str:
    return _of_model("responses", model_slug)


def messages(model_slug: str) -> str:
    return _of_model("messages", model_slug)


def embeddings(model_slug: str) -> str:
    return _of_model("embeddings", model_slug)


def score(model_slug: str) -> str:
    return _of_model("score", model_slug)


def input_tokens(model_slug: str) -> str:
    return _of_model("input_tokens", model_slug)


def count_tokens(model_slug: str) -> str:
    return _of_model("count_tokens", model_slug)


def tokenize(model_slug: str) -> str:
    return _of_model("tokenize", model_slug)


def detokenize(model_slug: str) -> str:
    return _of_model("detokenize", model_slug)


def any_chat() -> str:
    return f"{ROOT}.chat.*"


def any_request() -> list[str]:
    """Return where clients ask for answers, whatever the model."""
    return [f"{ROOT}.{view}.*" for view in VIEWS]


def of_tenant(tenant: str, subject: str) -> str:
    """Return a public subject as a tenant's own: `penstock.v1.chat.x` → `penstock.v1.t.acme.chat.x`."""
    return f"{TENANTS}.{token(tenant, what='tenant')}.{subject.removeprefix(f'{ROOT}.')}"


def of_any_tenant(subject: str) -> str:
    """Return what a gateway subscribes to, to hear `subject` from every tenant."""
    return f"{TENANTS}.*.{subject.removeprefix(f'{ROOT}.')}"


def any_of_tenant(tenant: str) -> str:
    return f"{TENANTS}.{token(tenant, what='tenant')}.>"


def any_of_tenants() -> str:
    return f"{TENANTS}.>"


def tenant_of(subject: str) -> str:
    """Return the tenant that a subject belongs to; empty for one that belongs to none."""
    return subject.removeprefix(f"{TENANTS}.").partition(".")[0] if subject.startswith(f"{TENANTS}.") else ""


def usage(tenant: str) -> str:
    return f"{ROOT}.usage.{token(tenant, what='tenant')}"


def any_usage() -> str:
    return f"{ROOT}.usage.*"


def cancel(request: str) -> str:
    return f"{ROOT}.cancel.{token(request, what='request id')}"


def any_cancel() -> str:
    return f"{ROOT}.cancel.*"


def explain() -> str:
    """Return where clients ask what became of a request."""
    return f"{ROOT}.explain"


def batch(model_slug: str) -> str:
    return _of_model("batch", model_slug)


def any_batch() -> str:
    return f"{ROOT}.batch.*"


def result(line: str) -> str:
    return f"{ROOT}.result.{token(line, what='line id')}"


def any_result() -> str:
    return f"{ROOT}.result.*"


def kept() -> str:
    """Return the subject of everything that streams keep of files and batches."""
    return f"{_KEPT}.>"


def record(kind: str, id: str) -> str:
    """Return where it is kept what a file or a batch is. `kind`: file or batch."""
    return f"{_KEPT}.record.{token(kind)}.{token(id)}"


def records_of(kind: str) -> str:
    return f"{_KEPT}.record.{token(kind)}.*"


def any_record() -> str:
    return f"{_KEPT}.record.*.*"


def file_part(file: str, number: int) -> str:
    return f"{_KEPT}.file.{token(file)}.{number}"


def parts_of(file: str) -> str:
    return f"{_KEPT}.file.{token(file)}.*"


def any_file_part() -> str:
    return f"{_KEPT}.file.*.*"


def line(model_slug: str, batch: str, id: str) -> str:
    """Return where a line waits for its answer. `id`: its number in a batch's file, or what its sender called it."""
    return f"{_KEPT}.line.{token(model_slug, what='model')}.{token(batch)}.{token(id, what='line id')}"


def lines_of_model(model_slug: str) -> str:
    return f"{_KEPT}.line.{token(model_slug, what='model')}.*.*"


def lines_of_batch(batch: str) -> str:
    return f"{_KEPT}.line.*.{token(batch)}.*"


def any_line() -> str:
    return f"{_KEPT}.line.*.*.*"


def keep(model_slug: str, batch: str) -> str:
    """Return where it is kept that a batch needs a gateway to see it through. `model_slug`: of the first model of the gateway
    that took it."""
    return f"{_KEPT}.keep.{token(model_slug, what='model')}.{token(batch)}"


def batches_to_keep(model_slug: str) -> str:
    return f"{_KEPT}.keep.{token(model_slug, what='model')}.*"


def any_keep() -> str:
    return f"{_KEPT}.keep.*.*"


def line_result(batch: str, id: str) -> str:
    return f"{_KEPT}.result.{token(batch)}.{token(id, what='line id')}"


def results_of(batch: str) -> str:
    return f"{_KEPT}.result.{token(batch)}.*"


def any_line_result() -> str:
    return f"{_KEPT}.result.*.*"


def inbox(role: str, worker: str) -> str:
    return f"{INTERNAL}.inbox.{token(role, what='role')}.{token(worker, what='worker id')}"


def any_inbox_of(role: str) -> str:
    return f"{INTERNAL}.inbox.{token(role, what='role')}.*"


def presence(role: str, worker: str) -> str:
    return f"{INTERNAL}.presence.{token(role, what='role')}.{token(worker, what='worker id')}"


def presence_of(role: str) -> str:
    return f"{INTERNAL}.presence.{token(role, what='role')}.*"


def is_presence_of(subject: str, role: str, worker: str) -> bool:
    """Whether a heartbeat on `subject` may be one of this worker: permissions of a role restrict subjects, not contents."""
    return subject == f"{INTERNAL}.presence.{role}.{worker}"


def any_presence() -> str:
    return f"{INTERNAL}.presence.>"


def kv_events(role: str, worker: str) -> str:
    """Return where a worker tells what its prefix cache holds."""
    return f"{INTERNAL}.kv.{token(role, what='role')}.{token(worker, what='worker id')}"


def is_kv_events_of(subject: str, role: str, worker: str) -> bool:
    """Whether what is told on `subject` may be said by this worker."""
    return subject == f"{INTERNAL}.kv.{role}.{worker}"


def kv_events_of(role: str) -> str:
    return f"{INTERNAL}.kv.{token(role, what='role')}.*"


def any_kv_events() -> str:
    return f"{INTERNAL}.kv.>"


def last_token(subject: str) -> str:
    """Return the last token of a subject: the model slug, request id or worker id it names."""
    return subject.rsplit(".", 1)[-1]


def reply_prefix(connection: str) -> str:
    """Return where answers to the requests of one connection of no role arrive, one more token each. Tenants can't listen
    there."""
    return f"{INTERNAL}.reply.{token(connection, what='connection')}"


def replies_of(role: str) -> str:
    """Return where answers to the requests of a role's connections arrive, a token for the connection and one more each."""
    return f"{INTERNAL}.reply.{token(role, what='role')}"


def any_reply() -> str:
    return f"{INTERNAL}.reply.>"


def is_client_inbox(subject: str) -> bool:
    """Whether `subject` is what `Bus.new_inbox` makes: the only kind of subject of ours that a client may name as its inbox."""
    return _CLIENT_INBOX.fullmatch(subject) is not None
