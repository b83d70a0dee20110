"""A whole Penstock for a test: a real nats-server, real processes, real weights or the simulated engine; and ways to hurt it.

async with Stack(nats_url, directory) as stack:
    await stack.start("gateway"); await stack.start("prefill"); await stack.start("decode")
    await stack.ready()
    reply = await stack.complete([1, 2, 3], max_tokens=32)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio
import httpx

from common.protocol import messages, subjects
from common.protocol.handles import Role
from common.protocol.messages import Presence
from common.runtime.bus import Bus, BusMessage
from common.runtime.nats_bus import connect

ROOT = Path(__file__).parents[2]
NOTHING: Mapping[str, str] = {}
HTTP_TIMEOUT = httpx.Timeout(180.0)


@dataclass
class Reply:
    """One streamed completion. `times`: seconds (monotonic) at which each chunk with text arrived."""

    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    times: list[float] = field(default_factory=list)


class Stack:
    """`flags` go to every service (for example `--model`, `--dtype`)."""

    def __init__(
        self, nats_url: str, directory: Path, *, flags: tuple[str, ...] = (), engine_flags: tuple[str, ...] = ()
    ) -> None:
        self.nats_url = nats_url
        self.directory = directory
        self.flags = flags
        self.engine_flags = engine_flags
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.heard: dict[str, tuple[float, Presence]] = {}
        self._started: Counter[str] = Counter()
        self.shm_dir = directory / "shm"
        self.bus: Bus

    async def __aenter__(self) -> Stack:
        self.shm_dir.mkdir()
        self.bus = await connect(self.nats_url, name="test")
        await self.bus.subscribe(subjects.any_presence(), self._hear)
        self.client = httpx.AsyncClient(timeout=HTTP_TIMEOUT, limits=httpx.Limits(max_connections=None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.client.aclose()
            await self.stop()
            await self.bus.close()
        if kind is not None:
            for log in sorted(self.directory.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}")  # noqa: T201

    async def stop(self) -> None:
        """End every process, and forget them."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for name, process in self.processes.items():
            with anyio.move_on_after(15):
                while process.poll() is None:
                    await anyio.sleep(0.02)
            if process.poll() is None:
                process.kill()
                process.wait()
                print(f"{name} had to be killed")  # noqa: T201
        self.processes.clear()

    def _hear(self, message: BusMessage) -> None:
        presence = messages.decode(message.data)
        assert isinstance(presence, Presence)
        self.heard[presence.worker.id] = (time.monotonic(), presence)

    # -- processes

    async def start(
        self,
        role: Role,
        *flags: str,
        name: str = "",
        environment: Mapping[str, str] = NOTHING,
        within: tuple[str, ...] = (),
    ) -> str:
        """Start a service as a process of its own and return its worker id; `ready` waits for it.

        within: the command that runs it, for example in another network namespace.
        """
        name = name or f"{role}-{self._started[role]}"
        self._started[role] += 1
        command = [*within, sys.executable, "-m", f"services.{role}", "--nats-url", self.nats_url, "--worker-id", name]
        command += ["--http-port", "0", "--shm-dir", str(self.shm_dir), *self.flags]
        if role in ("prefill", "decode"):
            command += ["--threads", "1", *self.engine_flags]
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*command, *flags],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "PENSTOCK_PARENT_PID": str(os.getpid()), **environment},
            )
        return name

    async def ready(self, *names: str, within_s: float = 60) -> None:
        """Wait until these workers (all, when none is named) say that they are ready, and the gateway's canary went through."""
        with anyio.fail_after(within_s):
            for name in names or tuple(self.processes):
                while self.state(name) != "ready":
                    assert self.processes[name].poll() is None, f"{name} ended: {self.log(name)[-2000:]}"
                    await anyio.sleep(0.05)
                if name.startswith("gateway"):
                    while (await self.client.get(f"{self.url(name)}/ready")).status_code != 200:
                        await anyio.sleep(0.05)

    def state(self, name: str) -> str:
        """What the worker said last, or "silent" when that is more than two seconds ago."""
        heard_at, presence = self.heard.get(name, (0.0, None))
        return "silent" if presence is None or time.monotonic() - heard_at > 2 else presence.state

    def presence(self, name: str) -> Presence:
        return self.heard[name][1]

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def url(self, name: str = "gateway-0") -> str:
        return f"http://127.0.0.1:{self.presence(name).http_port}"

    def send_signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """kill -9, and forget it."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()
        self.heard.pop(name, None)

    async def ended(self, name: str, within_s: float = 30) -> int:
        """Wait for a process to end by itself; returns its exit status."""
        process = self.processes[name]
        with anyio.fail_after(within_s):
            while process.poll() is None:
                await anyio.sleep(0.02)
        del self.processes[name]
        self.heard.pop(name, None)
        return process.returncode

    # -- requests

    async def stream(self, path: str, body: dict[str, Any], *, gateway: str = "gateway-0") -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed request; an error response is one event too."""
        body = {"model": "smollm2-135m-instruct", "stream": True, "stream_options": {"include_usage": True}, **body}
        async with self.client.stream("POST", f"{self.url(gateway)}{path}", json=body) as response:
            if response.status_code != 200:
                yield json.loads(await response.aread())
                return
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])

    async def complete(
        self, prompt: str | list[int], *, gateway: str = "gateway-0", reply: Reply | None = None, **body: Any
    ) -> Reply:
        """Stream one completion to its end (greedy unless said otherwise). `reply` fills while it runs."""
        reply = reply or Reply()
        async for event in self.stream("/v1/completions", {"prompt": prompt, "temperature": 0, **body}, gateway=gateway):
            if "error" in event:
                reply.error = event["error"]
            reply.usage = event.get("usage") or reply.usage
            for choice in event.get("choices", ()):
                reply.text += choice["text"]
                reply.finish = choice["finish_reason"] or reply.finish
                if choice["text"]:
                    reply.times.append(time.monotonic())
        return reply

    # -- promises

    async def clean(self, within_s: float = 3.0) -> float:
        """Everything is given back on every worker within this time (and a heartbeat): nothing owned, leased or running.

        Returns how many seconds it took.
        """
        began = time.monotonic()
        held = ["nothing heard yet"]
        while held and time.monotonic() - began < within_s + 0.6:
            await anyio.sleep(0.05)
            held = [
                f"{name}: {presence.kv} running={presence.running} waiting={presence.waiting}"
                for name, (_, presence) in self.heard.items()
                if name in self.processes and (presence.kv.owned or presence.kv.leased or presence.running or presence.waiting)
            ]
        assert not held, held
        took_s = time.monotonic() - began
        for _, presence in self.heard.values():
            kv = presence.kv
            assert kv.free + kv.owned + kv.leased + kv.cached == kv.total, presence
        return took_s
