"""The gateway's settings: `[gateway]` in the file, `PENSTOCK_<FIELD>` in the environment, `--field-name` as a flag."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from common.protocol.errors import ConfigError
from common.runtime.api_keys import check_key, read
from common.runtime.fields import DERIVED, PER_MODEL, SECRET
from common.runtime.settings import ServiceConfig
from common.text.output.formats import ReasoningParser, ToolParser

ReplyPrefix = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\s$*>.][^\s*>]*\.$")]
"""Whole tokens, with the dot after them."""


Origin = Annotated[str, Meta(max_length=256, pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@*]+/?)$")]
"""A scheme, a host and a port if it is not the scheme's own, as a browser says it in `Origin`; or `*`."""


class GatewayConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gateways. Times in seconds, sizes in bytes."""

    of_all_models: ClassVar[bool] = True

    models: Annotated[tuple[GatewayConfig, ...], Meta(extra=DERIVED)] = ()
    """The settings of each model, where there are several: those of a gateway that serves it alone. The first model's are also
    these here."""

    http_port: Annotated[int, Meta(ge=-1, le=65535, description="port of the OpenAI API; 0: any free one; -1: no HTTP")] = 8000
    api_key: Annotated[
        str, Meta(description="HTTP clients must send it as a bearer token; empty lets everyone in", extra=SECRET)
    ] = ""

    api_key_file: Annotated[str, Meta(description="file with the API key, in place of api_key")] = ""
    api_keys: Annotated[str, Meta(description="file of tenants, their keys' digests and limits: see `penstock keys`")] = ""

    allow_origin: Annotated[
        tuple[Origin, ...], Meta(description="web pages that may use the API (CORS): https://chat.example.com, or `*` for all")
    ] = ()

    reply_prefixes: Annotated[
        tuple[ReplyPrefix, ...], Meta(description="NATS subjects that requests may be answered on begin with one of these")
    ] = ("_INBOX.",)

    max_body_bytes: Annotated[int, Meta(description="largest request body over HTTP", ge=1)] = 8 * 1024 * 1024
    max_bodies_bytes: Annotated[int, Meta(description="what bodies being read may hold in all; more are refused", ge=1)] = (
        64 * 1024 * 1024
    )
    max_n: Annotated[int, Meta(description="largest `n` of one request", ge=1)] = 16
    max_answer_values: Annotated[
        int, Meta(description="largest n × max_tokens × (1 + top_logprobs) of one request, all prompts together", ge=1)
    ] = 4 * 1024 * 1024
    max_collected_bytes: Annotated[int, Meta(description="what all answers that are not streamed may hold at once", ge=1)] = (
        1024 * 1024 * 1024
    )
    max_queue: Annotated[int, Meta(description="requests that may wait for a worker; more are refused with 429", ge=0)] = 1024
    max_requests: Annotated[int, Meta(description="requests in all, waiting or running; more are refused", ge=1)] = 8192

    strict: Annotated[bool, Meta(description="refuse arguments without effect, instead of warning of them")] = False
    aliases: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(description="further names that clients may use for the model", extra=PER_MODEL),
    ] = ()
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(description="auto: the model's own sampling values where a request names none", extra=PER_MODEL),
    ] = "auto"
    tool_parser: Annotated[
        ToolParser,
        Meta(
            description="how the model writes calls of tools; auto: as its chat template says; none: no tools", extra=PER_MODEL
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        Meta(description="how the model marks reasoning; auto: as its chat template says; none: it is text", extra=PER_MODEL),
    ] = "auto"
    access_log: Annotated[bool, Meta(description="log one line per answered request; never its text")] = True

    default_deadline_s: Annotated[float, Meta(description="time a request may take when the client names none", gt=0)] = 600.0
    max_deadline_s: Annotated[float, Meta(description="the longest deadline a client may name", gt=0)] = 3600.0
    sse_keepalive_s: Annotated[float, Meta(description="a comment is sent on an idle SSE stream this often", gt=0)] = 15.0
    no_workers_grace_s: Annotated[float, Meta(description="how long requests wait while no decode worker lives", ge=0)] = 10.0

    direct_max_tokens: Annotated[
        int, Meta(description="uncached prompts up to this length skip the prefill pool; -1 never skips it", ge=-1)
    ] = 64
    slo_ttft_ms: Annotated[
        float,
        Meta(
            description="objective for the first token, ms: a decode worker computes a long prompt where the prefill pool "
            "would miss it, and prompts that miss it anyhow let others pass; 0: only where prefill has had no room for seconds",
            ge=0,
        ),
    ] = 0.0
    affinity_blocks: Annotated[int, Meta(description="prompt blocks remembered for prefix affinity", ge=0)] = 65536
    kv_index_blocks: Annotated[
        int, Meta(description="cached KV blocks of workers that are known, for each model; 0: only what was sent to them", ge=0)
    ] = 2_000_000

    task_timeout_s: Annotated[float, Meta(description="how long a worker may take to accept or reject a task", gt=0)] = 4.0
    stall_s: Annotated[float, Meta(description="silence of a living worker after which frames are fetched again", gt=0)] = 1.0
    prefill_timeout_s: Annotated[float, Meta(description="time a prompt may take before another worker tries it", gt=0)] = 120.0
    max_fetches: Annotated[int, Meta(description="unanswered fetches before a request moves to another worker", ge=1)] = 3
    max_attempts: Annotated[int, Meta(description="attempts that may fail for reasons other than a lost worker", ge=1)] = 4
    max_losses: Annotated[
        int, Meta(description="workers that may die with a request, each without giving a token of it, before it ends", ge=1)
    ] = 3
    canary: Annotated[
        bool, Meta(description="send a tiny request to each worker when it appears, and now and then while it is idle")
    ] = True
    canary_interval_s: Annotated[float, Meta(description="between canaries to a worker that gives no tokens", gt=0)] = 30.0
    canary_timeout_s: Annotated[float, Meta(description="deadline of one canary request", gt=0)] = 30.0

    batch_storage_mb: Annotated[
        int,
        Meta(description="MiB that files and batches may take of the NATS server's disk, with all gateways", ge=16, le=1 << 30),
    ] = 2048
    batch_retention_s: Annotated[float, Meta(description="files, batches and results are removed at this age", ge=60)] = (
        30 * 24 * 3600.0
    )
    batch_replicas: Annotated[int, Meta(description="servers of a NATS cluster that keep each of them", ge=1, le=5)] = 1
    batch_max_running: Annotated[
        int, Meta(description="lines of batches that a gateway runs at once, for each model; 0: none", ge=0)
    ] = 64
    batch_max_lines: Annotated[int, Meta(description="lines of one batch", ge=1, le=1_000_000)] = 50_000
    max_file_bytes: Annotated[int, Meta(description="largest file that can be uploaded", ge=1)] = 200 * 1024 * 1024

    def check(self) -> None:
        """:raises ConfigError: the API key, or the file of keys, can't be used."""
        _ = self.key
        if self.api_keys:
            read(Path(self.api_keys))

    @property
    def page_origins(self) -> tuple[str, ...]:
        """Origins of web pages that may send requests; those of `allow_origin` may read the answers, too."""
        return (*self.allowed_origins, *self.allow_origin)

    @property
    def each(self) -> tuple[GatewayConfig, ...]:
        """The settings of each model, also of an only one."""
        return self.models or (self,)

    @property
    def key(self) -> str:
        """What HTTP clients must send; empty: nothing.

        :raises ConfigError: api_key_file can't be read or is empty, or api_key is given, too, or no header can hold the key.
        """
        if not self.api_key_file:
            return check_key(self.api_key, "api_key") if self.api_key else ""
        if self.api_key:
            raise ConfigError("both api_key and api_key_file are given: use one of them", param="api_key_file")
        try:
            key = Path(self.api_key_file).read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"can't read {self.api_key_file}, which is to hold the API key", param="api_key_file") from error
        if not key:
            raise ConfigError(f"{self.api_key_file} is empty: it is to hold the API key", param="api_key_file")
        return check_key(key, "api_key_file")
