"""`penstock bench`: a closed loop of equal requests; TTFT, ITL and throughput as percentiles.

Closed loop: `--concurrency` clients, each sending its next request when its last one ended. Latencies are what a client
sees. Each prompt begins with a number of its own, so that only the chat template is shared and prefix caches don't flatter.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import anyio
import msgspec
import typer
from rich.progress import Progress

from common.cli import speculation_counts
from common.cli.bench_report import Report, summary, table
from common.cli.chunks import Chunk, Timing
from common.cli.client import ChatStream, check_served, connected, served_model
from common.cli.console import DEFAULT_NATS_URL, NatsUrl, err, out, run, write_answer
from common.cli.generate import chat_body, conversation
from common.cli.model_names import ModelName
from common.cli.net import may_use_proxy
from common.cli.speculation_json import speculation_summary
from common.cli.speculation_plot import check_plot, draw
from common.cli.speculation_report import Speculation, between, speculation_table
from common.protocol.errors import BusError, ConfigError, InternalError, PenstockError, ProtocolError, UnknownModel, from_wire

if TYPE_CHECKING:
    import httpx

Ask = Callable[[int], Awaitable[Timing]]
"""Run request number i to its end."""
Begin = Callable[[str], Awaitable[None]]
"""Called with the model's name right before the load."""

_FILLER = "The miller opens the gate a little, the water falls on the wheel, and the stones begin to turn. "


def command(
    requests: Annotated[int, typer.Option("--requests", min=1, metavar="N", help="Requests in all.")] = 32,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, metavar="N", help="Requests at a time.")] = 4,
    prompt_words: Annotated[int, typer.Option("--prompt-words", min=1, metavar="N", help="Words of each prompt.")] = 100,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, metavar="N", help="Tokens of each answer.")] = 64,
    url: Annotated[
        str,
        typer.Option("--url", metavar="URL", help="Measure over HTTP, not NATS: http://127.0.0.1:8000"),
    ] = "",
    api_key: Annotated[
        str, typer.Option("--api-key", metavar="KEY", envvar="PENSTOCK_API_KEY", help="The API key of the server at --url.")
    ] = "",
    model: ModelName = "",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one line of JSON, with units in the names."),
    ] = False,
    speculation: Annotated[
        bool,
        typer.Option("--speculation", help="Also say what speculation gave, by decode worker and draft worker."),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="With --speculation: draw it (.png, .svg, .pdf)."),
    ] = None,
    nats_url: NatsUrl = DEFAULT_NATS_URL,
) -> None:
    """Measure TTFT, ITL and tok/s under a steady number of concurrent requests."""

    def body(number: int) -> dict[str, Any]:
        prompt = prompt_of(number, prompt_words)
        # the length must not depend on what the model says
        return chat_body(conversation("", prompt), max_tokens=max_tokens, temperature=0, seed=number) | {"ignore_eos": True}

    async def measure(begin: Begin = _at_once) -> Report:
        if url:
            return await _over_http(server_of(url), api_key, model, body, requests, concurrency, begin)
        return await _over_nats(nats_url, model, body, requests, concurrency, begin)

    async def measure_speculation() -> tuple[Report, Speculation]:
        async with speculation_counts.finding(server_of(url) if url else "", _authorization(api_key), nats_url) as find:
            before: list[speculation_counts.Reading] = []
            unread: dict[str, str] = {}

            async def begin(name: str) -> None:
                readings, failures = await speculation_counts.read_before(await find(), name)
                before.extend(readings)
                unread.update(failures)

            report = await measure(begin)
            after, failures = await speculation_counts.read(await find())
        found = between(before, after, report.model)
        unread |= {worker: f"{worker} ended during the load: what it counted is missing" for worker in found.unread}
        for line in (unread | failures).values():
            err.print(line, markup=False)
        return report, found

    found = Speculation()
    if plot is not None:
        if not speculation:
            raise ConfigError("--plot draws what --speculation finds: give both", param="plot")
        check_plot(plot)
    if speculation:
        report, found = run(measure_speculation)
    else:
        report = run(measure)
    if as_json:
        settings = {
            "concurrency": concurrency,
            "prompt_words": prompt_words,
            "max_tokens": max_tokens,
            "transport": "http" if url else "nats",
        }
        given = {"speculation": speculation_summary(found)} if speculation else {}
        write_answer(msgspec.json.encode(settings | summary(report) | given).decode() + "\n")
    else:
        out.print(table(report))
        if speculation:
            out.print(speculation_table(found))
    if plot is not None:
        draw(found.decode, plot)
    if report.failed:
        raise InternalError(f"{report.failed} of {report.requests} requests failed")


def server_of(url: str) -> str:
    """A server's address without the API's path.

    >>> server_of("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000'

    :raises ConfigError: if it is no HTTP URL.
    """
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        is_server = False
    if not is_server:
        raise ConfigError(f"--url {url!r} is no address of a server: give http://host:port", param="url")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def prompt_of(number: int, words: int) -> str:
    """`words` words that differ from every other prompt's from the first one on."""
    filler = _FILLER.split()
    return " ".join([f"{number}:", *(filler[(number + i) % len(filler)] for i in range(words - 1))])


async def _at_once(model: str) -> None: ...


async def closed_loop(ask: Ask, requests: int, concurrency: int) -> Report:
    """Run `ask(0) … ask(requests - 1)`, `concurrency` at a time."""
    report = Report(requests=requests)
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
                    reason = f"{error.code}: {error}"
                    report.reasons[reason] += 1
                    if report.reasons[reason] == 1:
                        err.print(f"request {number}: {error.code}: {error}", markup=False)
                bar.advance(task)

        async with anyio.create_task_group() as clients:
            for _ in range(min(concurrency, requests)):
                clients.start_soon(client)
    report.elapsed_s = time.monotonic() - started
    for reason, count in report.reasons.items():
        if count > 1:
            err.print(f"{count} requests: {reason}", markup=False)
    return report


async def _over_nats(
    nats_url: str, model: str, body: Callable[[int], dict[str, Any]], requests: int, concurrency: int, begin: Begin
) -> Report:
    async with connected(nats_url, "bench") as bus:
        name = await served_model(bus, model)
        if model:
            await check_served(bus, name)
        await begin(name)

        async def ask(number: int) -> Timing:
            async with ChatStream(bus, name, body(number)) as stream:
                async for _ in stream:
                    pass
            return stream.timing

        return msgspec.structs.replace(await closed_loop(ask, requests, concurrency), model=name)


async def _over_http(
    url: str,
    api_key: str,
    model: str,
    body: Callable[[int], dict[str, Any]],
    requests: int,
    concurrency: int,
    begin: Begin,
) -> Report:
    import httpx

    limits = httpx.Limits(max_connections=concurrency)
    headers, proxy = _authorization(api_key), may_use_proxy(url)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits, trust_env=proxy) as http:
        name = await _model(http, model)
        await begin(name)

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

        return msgspec.structs.replace(await closed_loop(ask, requests, concurrency), model=name)


def _authorization(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def _model(http: httpx.AsyncClient, wanted: str) -> str:
    """Return `wanted`, or the first model that the server lists.

    :raises ConfigError: if there is no OpenAI API, or it refuses this client. :raises UnknownModel: `wanted` is not listed.
    """
    import httpx

    try:
        answer = await http.get("/v1/models")
    except httpx.HTTPError as error:
        raise ConfigError(f"nothing answers on {http.base_url} ({type(error).__name__}): is the gateway there?") from error
    if answer.status_code == 401:
        raise ConfigError(f"{http.base_url} wants an API key: give it as --api-key or PENSTOCK_API_KEY", param="api_key")
    try:
        names = [str(model["id"]) for model in answer.raise_for_status().json()["data"]]
        name = wanted or names[0]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        if wanted:
            return wanted  # not every server has a list
        raise ConfigError(
            f"{http.base_url} gave no list of models (status {answer.status_code}): is it an OpenAI API?"
        ) from error
    if name not in names:
        raise UnknownModel(f"the model {name[:100]!r} is not served on {http.base_url}: there are {', '.join(names)}")
    return name


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
    if chunk.says_something:
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
