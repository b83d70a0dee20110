"""What the kvstore's disk tier gives: time to the first token of a prompt whose prefix was computed before, also before
everything was stopped and started again; and how fast blocks are read, beside what the disk gives.

    python -m bench.kv_disk --folder /mnt/nvme/kv-bench

Real weights on the CPU, a nats-server, a gateway, a prefill worker, a decode worker and a kvstore, as processes. Each of
--prompts prefixes of --prefix-tokens tokens is asked for once, and then again with another ending:

    without any cache      the same prompts, each under a salt of its own, in a system without a kvstore
    same worker            the prefill worker has the prefix in its own pool
    prefill restarted      the kvstore has it in shared memory
    everything restarted   kvstore, workers, gateway and nats-server were stopped and started: the kvstore has it on disk. The
                           system's page cache holds nothing of its files

Times are from the request to the first piece of text, over HTTP, one request at a time. Each answer must be, token for token,
the one that came without any cache. Where one differs, the status is 1.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import anyio
import httpx
import msgspec

from bench.common.machine import describe
from bench.common.stack import Child, Stack, free_ports, quiet_flags, running
from bench.common.table import markdown
from bench.kv_disk import rates
from common.protocol.errors import ConfigError

MODEL = "smollm2-135m-instruct"
TAIL_TOKENS = 24
SETTLE_S = 60.0


class Answer(NamedTuple):
    """ttft_s: seconds to the first text; `cached`: tokens of the prompt that were not computed; `text`: what was written."""

    ttft_s: float
    cached: int
    text: str


class System:
    """A whole system over one bus. `kv`: the folder of its kvstore; None: it has none."""

    def __init__(self, stack: Stack, kv: Path | None) -> None:
        self._stack = stack
        self._kv = kv
        self._nats, self._http, self._store = free_ports(3)
        self._prefill: Child | None = None

    async def start(self) -> None:
        self._stack.start_nats(self._nats)
        self._stack.start("gateway", "services.gateway", *self._flags("gateway", self._http), "--direct-max-tokens=-1")
        self._stack.start("decode", "services.decode", *self._flags("decode"), "--lookup=off")
        self.start_prefill()
        if self._kv is not None:
            flags = (f"--kv-disk={self._kv}", "--kv-disk-gb=8")
            self._stack.start("kvstore", "services.kvstore", *self._flags("kvstore", self._store), *flags)
        await self.ready()

    def start_prefill(self) -> None:
        self._prefill = self._stack.start("prefill", "services.prefill", *self._flags("prefill"))

    async def restart_prefill(self) -> None:
        """kill -9, and start another one."""
        assert self._prefill is not None
        self._prefill.process.kill()
        self._prefill.process.wait()
        self._stack.children.remove(self._prefill)
        self.start_prefill()
        await anyio.sleep(3)  # until the gateway has noticed both
        await self.ready()

    async def ready(self) -> None:
        await self._stack.wait_ready(self._http)
        if self._kv is not None:
            await self.wait_for_store("kvstore_disk_queue_blocks", lambda _: True)

    async def ask(self, prompt: list[int], max_tokens: int, **body: Any) -> Answer:
        """:raises ConfigError: no answer."""
        request = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        request |= {"stream": True, "stream_options": {"include_usage": True}, **body}
        ttft_s, cached, text = 0.0, 0, ""
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._http}", timeout=300) as http:
            began = time.perf_counter()
            async with http.stream("POST", "/v1/completions", json=request) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = msgspec.json.decode(line[6:])
                    if "error" in event:
                        raise ConfigError(f"the request failed: {event['error']}")
                    for choice in event["choices"]:
                        if choice["text"] and not text:
                            ttft_s = time.perf_counter() - began
                        text += choice["text"]
                    if event.get("usage"):
                        cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        if not text:
            raise ConfigError("an answer has no text")
        return Answer(ttft_s, cached, text)

    async def wait_for_store(self, metric: str, holds: Any) -> float:
        """Wait until a metric of the kvstore is as it should be; return it. :raises ConfigError: it never is."""
        ends_at = time.monotonic() + SETTLE_S
        async with httpx.AsyncClient() as http:
            while time.monotonic() < ends_at:
                try:
                    page = (await http.get(f"http://127.0.0.1:{self._store}/metrics")).text
                except httpx.HTTPError:
                    page = ""
                found = [line.split()[1] for line in page.splitlines() if line.startswith(f"penstock_{metric} ")]
                if found and holds(float(found[0])):
                    return float(found[0])
                await anyio.sleep(0.1)
        raise ConfigError(f"{metric} of the kvstore is not what it should be after {SETTLE_S:g} s")

    def _flags(self, role: str, port: int = 0) -> Sequence[str]:
        return quiet_flags(f"{role}-{time.monotonic_ns()}", f"nats://127.0.0.1:{self._nats}", MODEL, port)


@asynccontextmanager
async def system(folder: Path, kv: Path | None) -> AsyncIterator[System]:
    """Running and warm; its logs are in a folder of its own in `folder`."""
    async with running(Path(tempfile.mkdtemp(dir=folder, prefix="logs-"))) as stack:
        made = System(stack, kv)
        await made.start()
        await made.ask(list(range(100, 140)), 4, cache_salt="warm")
        yield made


async def compare(folder: Path, prefixes: list[list[int]], max_tokens: int) -> tuple[dict[str, list[Answer]], list[str]]:
    """The answers of each arrangement, and those that differ from what comes without any cache."""
    names = ("first request", "same worker", "prefill restarted", "everything restarted")
    chance = random.Random(99)
    tails = {name: [[chance.randrange(1000, 30_000) for _ in range(TAIL_TOKENS)] for _ in prefixes] for name in names}
    prompts = {name: [prefix + tail for prefix, tail in zip(prefixes, tails[name], strict=True)] for name in names}
    found: dict[str, list[Answer]] = {"without any cache": []}
    expected: dict[str, list[str]] = {}
    async with system(folder, None) as plain:
        for name in names:
            answers = [await plain.ask(prompt, max_tokens, cache_salt=f"{name} {i}") for i, prompt in enumerate(prompts[name])]
            found["without any cache"] += answers
            expected[name] = [answer.text for answer in answers]
    kv = folder / "kv"
    async with system(folder, kv) as running_system:
        for name in names[:3]:
            if name == "prefill restarted":
                await running_system.wait_for_store("kvstore_stored_blocks_total", lambda blocks: blocks > 0)
                await anyio.sleep(1)
                await running_system.restart_prefill()
            found[name] = [await running_system.ask(prompt, max_tokens) for prompt in prompts[name]]
        await anyio.sleep(1)
        await running_system.wait_for_store("kvstore_disk_queue_blocks", lambda blocks: not blocks)
    rates.drop_cache(kv)
    async with system(folder, kv) as running_system:
        found[names[3]] = [await running_system.ask(prompt, max_tokens) for prompt in prompts[names[3]]]
        await running_system.wait_for_store("kvstore_disk_hit_blocks_total", lambda blocks: blocks > 0)
        await running_system.wait_for_store("kvstore_disk_damaged_blocks_total", lambda blocks: not blocks)
    wrong = [
        f"{name}, prompt {i}: {answer.text!r}, not {expected[name][i]!r}"
        for name in names
        for i, answer in enumerate(found[name])
        if answer.text != expected[name][i]
    ]
    return found, wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kv_disk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", required=True, help="on the disk that is measured; what is written there is removed")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--copy-mb", type=int, default=1024, help="how much is copied to measure rates; 0: leave that out")
    given = parser.parse_args(argv)
    folder = Path(given.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder))
    wrong: list[str] = []
    try:
        print(describe(("torch", "numba", "lmdb")), flush=True)
        chance = random.Random(7)
        prefixes = [[chance.randrange(1000, 30_000) for _ in range(given.prefix_tokens)] for _ in range(given.prompts)]
        found, wrong = anyio.run(compare, work, prefixes, given.max_tokens)
        cold_s = median(answer.ttft_s for answer in found["without any cache"])
        rows = [
            [
                name,
                f"{1000 * median(answer.ttft_s for answer in answers):.0f}",
                f"{1000 * max(answer.ttft_s for answer in answers):.0f}",
                f"{cold_s / median(answer.ttft_s for answer in answers):.1f}",
                f"{median(answer.cached for answer in answers):.0f}",
            ]
            for name, answers in found.items()
        ]
        print(markdown(["prefix", "TTFT p50, ms", "slowest, ms", "times sooner", "cached tokens"], rows), flush=True)
        print(f"{len(wrong)} of {4 * given.prompts} answers differ from those without any cache", *wrong, sep="\n")
        if given.copy_mb:
            disk = rates.measure(work, given.copy_mb << 20)
            print(
                markdown(
                    ["MB/s", "plain copy", "disk tier", "share"],
                    [
                        ["read, nothing in the page cache", *_pair(disk.plain_read, disk.tier_read)],
                        ["read, all in the page cache", "—", f"{disk.tier_read_cached:.0f}", "—"],
                        ["write, until it is on the disk", *_pair(disk.plain_write, disk.tier_write)],
                    ],
                )
            )
    finally:
        if wrong:
            print(f"logs: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    return 1 if wrong else 0


def _pair(plain: float, tier: float) -> list[str]:
    return [f"{plain:.0f}", f"{tier:.0f}", f"{tier / plain:.0%}"]


if __name__ == "__main__":
    sys.exit(main())
