"""`penstock bench`: a closed loop of equal requests; TTFT, ITL and throughput as percentiles.

Closed loop: `--concurrency` clients, each sending its next request when its last one ended. Latencies are what a client
sees. Each prompt begins with a number of its own, so that only the chat template is shared and prefix caches don't flatter.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import anyio
import msgspec
import typer
from rich.progress import Progress
from rich.table import Table

from common.cli.client import ChatStream, Chunk, Timing, connected, served_model
from common.cli.console import DEFAULT_NATS_URL, ModelName, NatsUrl, err, out, run
from common.cli.generate import chat_body, conversation
from common.protocol.errors import BusError, ConfigError, InternalError, PenstockError, ProtocolError, from_wire

if TYPE_CHECKING:
    import httpx

Ask = Callable[[int], Awaitable[Timing]]
"""Run request number i to its end."""

_FILLER = "The miller opens the gate a little, the water falls on the wheel, and the stones begin to turn. "


class Report(msgspec.Struct, kw_only=True):
    """What a run measured. Seconds."""

    requests: int
    failed: int
    elapsed_s: float
    timings: list[Timing]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all requests over the whole time."""
        return sum(timing.tokens for timing in self.timings) / self.elapsed_s if self.elapsed_s else 0.0


def command(
    requests: Annotated[int, typer.Option("--requests", min=1, help="How many in all.")] = 32,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="How many at a time.")] = 4,
    prompt_words: Annotated[int, typer.Option("--prompt-words", min=1, help="Length of each prompt.")] = 100,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Length of each answer.")] = 64,
    url: Annotated[str, typer.Option("--url", help="Over HTTP instead of NATS: http://127.0.0.1:8000, /v1 or not")] = "",
    api_key: Annotated[str, typer.Option("--api-key", envvar="PENSTOCK_API_KEY", help="For --url.")] = "",
    model: ModelName = "",
    nats_url: NatsUrl = DEFAULT_NATS_URL,
) -> None:
    """Measure TTFT, ITL and tok/s under a steady number of concurrent requests."""

    def body(number: int) -> dict[str, Any]:
        prompt = prompt_of(number, prompt_words)
        # the length must not depend on what the model says
        return chat_body(conversation("", prompt), max_tokens=max_tokens, temperature=0, seed=number) | {"ignore_eos": True}

    async def measure() -> Report:
        if url:
            return await _over_http(server_of(url), api_key, model, body, requests, concurrency)
        return await _over_nats(nats_url, model, body, requests, concurrency)

    report = run(measure)
    out.print(table(report))
    if report.failed:
        raise InternalError(f"{report.failed} of {report.requests} requests failed")


def server_of(url: str) -> str:
    """A server's address without the API's path.

    >>> server_of("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000'

    :raises ConfigError: if it is no HTTP URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url!r} is no address of a server: give http://host:port", param="url")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def prompt_of(number: int, words: int) -> str:
    """`words` words that differ from every other prompt's from the first one on."""
    filler = _FILLER.split()
    return " ".join([f"{number}:", *(filler[(number + i) % len(filler)] for i in range(words - 1))])


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank; 0 for no values.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 50), percentile([4.0, 1.0, 3.0, 2.0], 99), percentile([], 50)
    (2.0, 4.0, 0.0)
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)
    return ordered[max(0, int(rank) - 1)]


def table(report: Report) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("")
    for title in ("p50", "p90", "p99"):
        shown.add_column(title, justify="right")
    rows = {
        "TTFT": [timing.ttft_s for timing in report.timings],
        "ITL (mean of a request)": [timing.itl_s for timing in report.timings if timing.tokens > 1],
        "whole request": [timing.last - timing.started for timing in report.timings],
    }
    for name, values in rows.items():
        shown.add_row(name, *(f"{percentile(values, percent) * 1000:.1f} ms" if values else "-" for percent in (50, 90, 99)))
    shown.caption = (
        f"{len(report.timings)} requests in {report.elapsed_s:.1f} s · "
        f"{report.tokens_per_s:.1f} generated tok/s · {report.failed} failed"
    )
    return shown


async def closed_loop(ask: Ask, requests: int, concurrency: int) -> Report:
    """Run `ask(0) … ask(requests - 1)`, `concurrency` at a time."""
    report = Report(requests=requests, failed=0, elapsed_s=0.0, timings=[])
    reasons: Counter[str] = Counter()
    numbers = iter(range(requests))
    started = time.monotonic()
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("requests", total=requests)

        async def client() -> None:
            for number in numbers:  # shared: each client takes the next number
                try:
                    timing = await ask(number)
                    if not timing.tokens:
                        raise ProtocolError("the answer ended without a token")
                    report.timings.append(timing)
                except PenstockError as error:
                    report.failed += 1
                    reasons[f"{error.code}: {error}"] += 1
                    if reasons[f"{error.code}: {error}"] == 1:
                        err.print(f"request {number}: {error.code}: {error}", markup=False)
                bar.advance(task)

        async with anyio.create_task_group() as clients:
            for _ in range(min(concurrency, requests)):
                clients.start_soon(client)
    report.elapsed_s = time.monotonic() - started
    for reason, count in reasons.items():
        if count > 1:
            err.print(f"{count} requests: {reason}", markup=False)
    return report


async def _over_nats(
    nats_url: str, model: str, body: Callable[[int], dict[str, Any]], requests: int, concurrency: int
) -> Report:
    async with connected(nats_url, "bench") as bus:
        name = await served_model(bus, model)

        async def ask(number: int) -> Timing:
            async with ChatStream(bus, name, body(number)) as stream:
                async for _ in stream:
                    pass
            return stream.timing

        return await closed_loop(ask, requests, concurrency)


async def _over_http(
    url: str, api_key: str, model: str, body: Callable[[int], dict[str, Any]], requests: int, concurrency: int
) -> Report:
    import httpx

    authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, headers=authorization, timeout=120, limits=limits) as http:
        name = model or await _first_model(http)

        async def ask(number: int) -> Timing:
            timing, ended = Timing(time.monotonic()), False
            request = {"stream_options": {"include_usage": True}, **body(number), "model": name, "stream": True}
            try:
                async with http.stream("POST", "/v1/chat/completions", json=request) as response:
                    if response.status_code != 200:
                        raise _http_error(await response.aread())
                    async for line in response.aiter_lines():
                        ended |= _read_event(line, timing)
            except httpx.HTTPError as error:
                raise BusError(f"the connection failed: {type(error).__name__}") from error
            if not ended:
                raise BusError("the connection ended in the middle of an answer")
            return timing

        return await closed_loop(ask, requests, concurrency)


async def _first_model(http: httpx.AsyncClient) -> str:
    """:raises ConfigError: if there is no OpenAI API, or it refuses this client."""
    import httpx

    try:
        answer = await http.get("/v1/models")
    except httpx.HTTPError as error:
        raise ConfigError(f"nothing answers on {http.base_url} ({type(error).__name__}): is the gateway there?") from error
    if answer.status_code == 401:
        raise ConfigError(f"{http.base_url} wants an API key: give it as --api-key or PENSTOCK_API_KEY", param="api_key")
    try:
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{http.base_url} gave no list of models (status {answer.status_code}): is it an OpenAI API?"
        ) from error


def _read_event(line: str, timing: Timing) -> bool:
    """Take one line of a server-sent event stream; True for the last. :raises PenstockError: for an error, or no chunk."""
    data = line.removeprefix("data: ")
    if data == line:
        return False
    if data == "[DONE]":
        return True
    if '"error"' in data[:12]:
        raise _http_error(data.encode())
    try:
        chunk = msgspec.json.decode(data, type=Chunk)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the server sent a chunk that is no OpenAI chunk: {error}") from error
    if chunk.text or chunk.reasoning:
        timing.saw_text(time.monotonic())
    if chunk.usage is not None:
        timing.tokens = chunk.usage.completion_tokens
    return False


def _http_error(data: bytes) -> PenstockError:
    """The error of an OpenAI error body."""
    try:
        error = msgspec.json.decode(data)["error"]
        return from_wire(error.get("code") or "internal_error", error["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return InternalError(data[:200].decode(errors="replace"))
