"""A whole Penstock as a user starts it, for a measurement: `penstock up` on ports of its own, and streams over HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

import httpx
import msgspec

from bench.common.stack import ROOT, free_ports
from common.cli.chunks import Chunk, Timing
from common.runtime.parent_death import PARENT_VARIABLE

READY_TIMEOUT_S = 300.0


class Starting:
    """A `penstock up` that may not be ready yet. url: of its gateway."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
        self.url = url
        self._process = process
        self._log = log

    def wait(self) -> None:
        """:raises SystemExit: if it is not ready in time."""
        ends = time.monotonic() + READY_TIMEOUT_S
        while not _ready(self.url):
            if self._process.poll() is not None or time.monotonic() > ends:
                self._log.seek(0)
                raise SystemExit(f"penstock up is not ready: {self._log.read()[-2000:].decode(errors='replace')}")
            time.sleep(0.1)


@contextmanager
def starting(flags: Sequence[str], environ: Mapping[str, str] | None = None, *, bus: str = "") -> Iterator[Starting]:
    """A whole system, for several that start at once, which ends with this process, however it ends. environ: variables on top
    of this process's. bus: of a NATS server that runs already; one of its own without."""
    (port,) = free_ports(1)
    joins = f"--nats-url={bus}" if bus else "--nats-port=0"
    command = [sys.executable, "-m", "common.cli", "up", f"--http-port={port}", joins, *flags]
    guarded = [sys.executable, "-m", "common.runtime.parent_death", "SIGTERM", *command]
    env = os.environ | dict(environ or {}) | {PARENT_VARIABLE: str(os.getpid())}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(guarded, cwd=ROOT, env=env, stdout=log, stderr=log)
        try:
            yield Starting(process, f"http://127.0.0.1:{port}", log)
        finally:
            process.terminate()
            process.wait()


@contextmanager
def penstock_up(flags: Sequence[str]) -> Iterator[str]:
    """A whole system; its URL, once it is ready.

    :raises SystemExit: if it is not ready in time.
    """
    with starting(flags) as system:
        system.wait()
        yield system.url


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


async def model_of(http: httpx.AsyncClient) -> str:
    return str((await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"])


async def stream_chat(http: httpx.AsyncClient, model: str, prompt: str, tokens: int, **body: object) -> Timing:
    """One greedy answer: when its text came and how many tokens it had."""
    request = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    request |= {"stream": True, "stream_options": {"include_usage": True}, **body}
    timing = Timing(time.monotonic())
    async with http.stream("POST", "/v1/chat/completions", json=request) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            chunk = msgspec.json.decode(data, type=Chunk)
            if chunk.text:
                timing.saw_text(time.monotonic())
            if chunk.usage is not None:
                timing.tokens = chunk.usage.completion_tokens
    return timing
