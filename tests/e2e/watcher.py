"""Watches a gateway from outside: a process of its own asks for /health all the time, and the bus tells of heartbeats.

async with watching(stack) as watch:
    ...                         whatever should not disturb anybody
assert watch.longest_answer_s < 0.5 and watch.longest_silence_s < 1
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.to_thread

from tests.e2e.stack import ROOT, Stack

PERIOD_S = 0.002


@dataclass
class Watch:
    """Seconds: the longest wait for an answer from /health, and between two heartbeats."""

    longest_answer_s: float = 0.0
    longest_silence_s: float = 0.0
    answers: int = 0


@asynccontextmanager
async def watching(stack: Stack, gateway: str = "gateway-0") -> AsyncIterator[Watch]:
    watch = Watch()
    command = [sys.executable, "-m", "tests.e2e.watcher", str(stack.presence(gateway).http_port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    await anyio.to_thread.run_sync(process.stdout.readline)  # it has begun
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_listen, stack, gateway, watch)
            yield watch
            group.cancel_scope.cancel()
    finally:
        process.terminate()
        said, _ = await anyio.to_thread.run_sync(process.communicate)
    waits = json.loads(said)
    watch.answers, watch.longest_answer_s = len(waits), max(waits)


async def _listen(stack: Stack, gateway: str, watch: Watch) -> None:
    last, _ = stack.heard[gateway]
    while True:
        await anyio.sleep(0.01)
        heard_at, _ = stack.heard[gateway]
        watch.longest_silence_s = max(watch.longest_silence_s, heard_at - last)
        last = heard_at


def main(port: int) -> None:
    """Ask until SIGTERM, then print the seconds that each answer took, as JSON."""
    running = True
    waits: list[float] = []

    def end(*_: object) -> None:
        nonlocal running
        running = False

    signal.signal(signal.SIGTERM, end)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while running:
        began = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        waits.append(time.monotonic() - began)
        if len(waits) == 1:
            print("watching", flush=True)  # noqa: T201
        time.sleep(PERIOD_S)
    print(json.dumps(waits))  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]))
