"""Workers' counters of speculation before and after a load: where they are, how they are read, and what came in between.

Addresses come from heartbeats or from a gateway's `/sd`, counters from each worker's `/metrics`. Workers are looked for again
after the load, since one that was restarted has another port.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from common.cli.client import connected, decode_presence
from common.cli.net import may_use_proxy
from common.cli.status import DEAD_AFTER_S, LISTEN_S
from common.protocol import subjects
from common.protocol.errors import BusError, ConfigError, NoWorkers
from common.protocol.messages import Presence
from common.runtime.bus import Bus, BusMessage
from common.runtime.metrics import MODEL_LABEL

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 10.0
_PREFIXES = ("penstock_speculation_", "penstock_draft_", "penstock_engine_", "vllm:spec_decode_")
STARTED = "process_start_time_seconds"
DRAFT_WORKERS = "penstock_speculation_draft_workers"
MAX_TOKENS = "penstock_speculation_max_tokens"
DRAFTS = "penstock_speculation_drafts_total"
DRAFT_WORKER = "draft worker"
"""The drafter that every decode worker counts for, whether or not there are draft workers."""


class Key(msgspec.Struct, frozen=True):
    """One time series of a worker. place: position in a proposal, from 0 on; -1: all positions."""

    name: str
    drafter: str = ""
    place: int = -1


Counts = Counter[Key]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A worker whose metrics are at `url`. model: for a draft worker, what it drafts for; empty: any."""

    worker: str
    role: str
    model: str
    url: str


class Reading(msgspec.Struct, frozen=True):
    """What a worker had counted at `at`, of `time.monotonic`."""

    source: Source
    at: float
    counts: Counts


Find = Callable[[], Awaitable[list[Source]]]
"""Return the decode and draft workers that are alive now."""


@asynccontextmanager
async def finding(server: str, headers: Mapping[str, str], nats_url: str) -> AsyncIterator[Find]:
    """Find workers by the gateway at `server`, or, if that is empty, by heartbeats."""
    import httpx

    if server:
        proxy = may_use_proxy(server)
        async with httpx.AsyncClient(base_url=server, headers=headers, timeout=_TIMEOUT_S, trust_env=proxy) as http:
            yield lambda: found_by_gateway(http)
    else:
        async with connected(nats_url, "bench") as bus, found_on_bus(bus) as find:
            yield find


@asynccontextmanager
async def found_on_bus(bus: Bus) -> AsyncIterator[Find]:
    """Hear heartbeats while the block runs. :raises NoWorkers: if there are none at first."""
    heard: dict[str, tuple[float, Presence]] = {}

    def arrived(message: BusMessage) -> None:
        if presence := decode_presence(message):
            heard[presence.worker.id] = time.monotonic(), presence

    async def find() -> list[Source]:
        now = time.monotonic()
        return sources(presence for at, presence in heard.values() if now - at < DEAD_AFTER_S)

    subscription = await bus.subscribe(subjects.any_presence(), arrived)
    try:
        await anyio.sleep(LISTEN_S)
        if not heard and getattr(bus, "denied", ()):
            raise NoWorkers("this user of the bus may not hear who is there: give the gateway's address with --url")
        if not heard:
            raise NoWorkers("no worker on this bus: start some with `penstock up`, or name another bus with --nats-url")
        yield find
    finally:
        with anyio.CancelScope(shield=True):
            await subscription.unsubscribe()


def sources(workers: Iterable[Presence]) -> list[Source]:
    """Return where the metrics of decode and draft workers are."""
    return [
        Source(worker=one.worker.id, role=one.worker.role, model=one.model, url=f"http://{_host(one)}:{one.http_port}/metrics")
        for one in sorted(workers, key=lambda one: one.worker.id)
        if one.worker.role in ("decode", "draft") and one.http_port and one.http_host
    ]


def _host(worker: Presence) -> str:
    return f"[{worker.http_host}]" if ":" in worker.http_host else worker.http_host


async def found_by_gateway(http: httpx.AsyncClient) -> list[Source]:
    """Return where the metrics of decode and draft workers are, as a gateway tells Prometheus.

    :raises ConfigError: if the key is missing, wrong or not enough, or if this is no gateway of Penstock's.
    """
    import httpx

    try:
        answer = await http.get("/sd")
        if answer.status_code == 401:
            raise ConfigError(f"{http.base_url} wants an API key: give it as --api-key or PENSTOCK_API_KEY", param="api_key")
        if answer.status_code == 403:
            raise ConfigError(
                f"{http.base_url}/sd is not for this key: its tenant needs `dashboard = true`, or leave out --speculation",
                param="api_key",
            )
        groups: list[dict[str, Any]] = answer.raise_for_status().json()
        return [
            Source(
                worker=group["labels"]["worker"],
                role=group["labels"]["role"],
                model=group["labels"].get("__meta_penstock_model", ""),
                url=f"http://{target}/metrics",
            )
            for group in groups
            for target in group["targets"]
            if group["labels"]["role"] in ("decode", "draft")
        ]
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{http.base_url}/sd does not say where metrics are: is it Penstock's gateway?") from error


async def read(found: Iterable[Source]) -> tuple[list[Reading], dict[str, str]]:
    """Return what workers have counted so far; and for each that can't be read, by its id, a line that says why."""
    import httpx

    readings: list[Reading] = []
    failures: dict[str, str] = {}
    # workers are spoken to directly: a proxy of the environment does not know them
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as http:

        async def one(source: Source) -> None:
            try:
                at, text = time.monotonic(), (await http.get(source.url)).raise_for_status().text
                readings.append(Reading(source, at, parse(text)))
            except httpx.HTTPError as error:
                failures[source.worker] = (
                    f"the metrics of {source.worker} at {source.url} can't be read: {type(error).__name__}"
                )
            except ValueError:
                failures[source.worker] = f"what {source.url} says is no metrics of {source.worker}"

        async with anyio.create_task_group() as group:
            for source in found:
                group.start_soon(one, source)
    return sorted(readings, key=lambda reading: reading.source.worker), failures


def parse(text: str) -> Counts:
    """Return what one worker's /metrics say about speculation. :raises ValueError: if `text` is not in Prometheus' format."""
    counts: Counts = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name != STARTED and not sample.name.startswith(_PREFIXES):
                continue
            if not (sample.labels.keys() - {MODEL_LABEL, "drafter", "position", "draft_model"}):  # no buckets
                key = Key(sample.name, sample.labels.get("drafter", ""), int(sample.labels.get("position", -1)))
                counts[key] += sample.value  # pyright: ignore[reportArgumentType] # of counts and of seconds
    return counts


def growth(before: Counts, after: Counts) -> Counts:
    """Return what was counted in between. A process that was restarted has counted from zero."""
    if before[Key(STARTED)] != after[Key(STARTED)]:
        return after
    return Counter({key: max(0, count - before[key]) for key, count in after.items()})


def require_speculation(readings: Iterable[Reading], model: str) -> None:
    """Check, before any load, that a decode worker speculates; of `model`, if some serve that.

    :raises ConfigError: if there is none, or none whose metrics can be read.
    """
    decode = [reading for reading in readings if reading.source.role == "decode"]
    if not decode:
        raise ConfigError("no decode worker here serves metrics: leave out --speculation", param="speculation")
    serving = [reading for reading in decode if reading.source.model == model] or decode
    if not any(_speculates(reading.counts) for reading in serving):
        raise ConfigError(
            "no decode worker speculates: start Penstock with --lookup on, --head or --draft 1, or leave out --speculation",
            param="speculation",
        )


def _speculates(counts: Counts) -> bool:
    drafters = {key.drafter for key in counts if key.name == DRAFTS} - {DRAFT_WORKER}
    return counts.get(Key(MAX_TOKENS), 1) > 0 and bool(drafters or counts[Key(DRAFT_WORKERS)])


async def read_before(found: Iterable[Source], model: str) -> tuple[list[Reading], dict[str, str]]:
    """Read workers as `read` does, and check that decode workers answer and that one speculates.

    :raises ConfigError: see `require_speculation`. :raises BusError: if a decode worker does not answer.
    """
    found = list(found)
    readings, failures = await read(found)
    for source in found:
        if source.role == "decode" and source.worker in failures:
            raise BusError(failures[source.worker])
    require_speculation(readings, model)
    return readings, failures
