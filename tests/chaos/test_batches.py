"""A batch is seen through while gateways, workers and NATS are killed, with one right result for each line."""

from __future__ import annotations

import itertools
import json
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import pytest_asyncio

from common.models.source import DEFAULT_MODEL, ModelFiles
from common.protocol.handles import Role
from tests.chaos.site import SIMULATED_ENGINE, Job, simulated_jobs
from tests.e2e.stack import Stack
from tests.fixtures.nats import LocalNatsServer

log = logging.getLogger("chaos")

WHOLE: dict[Role, int] = {"gateway": 2, "prefill": 1, "decode": 2}
JETSTREAM = 'jetstream {{ store_dir: "{folder}", sync_interval: always }}\n'


class Site:
    def __init__(self, stack: Stack, server: LocalNatsServer) -> None:
        self.stack = stack
        self.server = server
        self.kills: Counter[str] = Counter()

    def alive(self, role: str) -> list[str]:
        return [name for name in self.stack.processes if name.startswith(role)]

    async def make_whole(self) -> None:
        for role, count in WHOLE.items():
            for _ in range(count - len(self.alive(role))):
                await self.stack.start(role)

    async def kill(self, what: str) -> None:
        """kill -9, and start another one."""
        self.kills[what] += 1
        if what == "nats":
            await anyio.to_thread.run_sync(self.server.restart)
            return
        self.stack.kill(random.choice(self.alive(what)))
        await self.make_whole()

    async def ask(self, ask: Callable[[str], Awaitable[httpx.Response]], within_s: float = 60) -> Any:
        """The answer of any gateway that gives one."""
        turn = 0
        with anyio.fail_after(within_s):
            while True:
                turn += 1
                names = [name for name in self.alive("gateway") if name in self.stack.heard]
                try:
                    answer = await ask(self.stack.url(names[turn % len(names)]))
                    if answer.status_code == 200:
                        return answer
                    assert answer.status_code >= 500, answer.text
                except (httpx.HTTPError, ZeroDivisionError, KeyError):
                    pass
                await anyio.sleep(0.1)


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    server = LocalNatsServer(tmp_path / "nats", more_config=JETSTREAM.format(folder=tmp_path / "jetstream"))
    server.start()
    try:
        async with Stack(server.url, tmp_path, engine_flags=SIMULATED_ENGINE) as stack:
            site = Site(stack, server)
            await site.make_whole()
            await stack.ready(within_s=120)
            yield site
    finally:
        server.stop()


def jsonl(jobs: list[Job]) -> bytes:
    lines = (
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"model": DEFAULT_MODEL, **job.body}}
        for n, job in enumerate(jobs)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def run(site: Site, jobs: list[Job], *, every_s: float, within_s: float) -> None:
    """A batch of `jobs`, with something killed `every_s`, each kind in turn."""
    http = site.stack.client
    content = jsonl(jobs)
    files, form = {"file": ("input.jsonl", content)}, {"purpose": "batch"}
    file = (await site.ask(lambda url: http.post(f"{url}/v1/files", files=files, data=form))).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    began = time.monotonic()
    batch: dict[str, Any] = (await site.ask(lambda url: http.post(f"{url}/v1/batches", json=asked))).json()
    seen: list[int] = []
    async with anyio.create_task_group() as group:

        async def hurt() -> None:
            for what in itertools.cycle(["gateway", "decode", "nats", "prefill", "gateway", "nats"]):
                await anyio.sleep(every_s)
                await site.kill(what)

        group.start_soon(hurt)
        with anyio.fail_after(within_s):
            while batch["status"] != "completed":
                await anyio.sleep(0.3)
                batch = (await site.ask(lambda url, id=batch["id"]: http.get(f"{url}/v1/batches/{id}"))).json()
                assert batch["status"] in ("validating", "in_progress", "finalizing", "completed"), batch
                seen.append(batch["request_counts"]["completed"])
        group.cancel_scope.cancel()
    log.info("%d lines in %.1f s, killed: %s", len(jobs), time.monotonic() - began, dict(site.kills))
    assert batch["request_counts"] == {"total": len(jobs), "completed": len(jobs), "failed": 0}
    assert batch["error_file_id"] is None
    assert len(set(seen)) > 3, "progress is to be seen"
    output = (await site.ask(lambda url: http.get(f"{url}/v1/files/{batch['output_file_id']}/content"))).text
    results = [json.loads(line) for line in output.splitlines()]
    assert Counter(result["custom_id"] for result in results) == Counter(str(n) for n in range(len(jobs)))
    for result in results:
        (choice,) = result["response"]["body"]["choices"]
        assert (choice["text"], choice["finish_reason"]) == (jobs[int(result["custom_id"])].expected(), "length")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_batch_survives_kills_of_everything(site: Site, smollm2: ModelFiles) -> None:
    jobs = list(itertools.islice(simulated_jobs(smollm2, 1, tokens=range(100, 300)), 300))
    await run(site, jobs, every_s=4.0, within_s=240)
    assert site.kills["nats"] and site.kills["gateway"] and site.kills["decode"]


@pytest.mark.slow
@pytest.mark.timeout(1600)
async def test_ten_thousand_lines_survive_kills_of_everything(site: Site, smollm2: ModelFiles) -> None:
    jobs = list(itertools.islice(simulated_jobs(smollm2, 2, tokens=range(5, 30)), 10_000))
    await run(site, jobs, every_s=8.0, within_s=1500)
    assert all(site.kills[what] for what in ("nats", "gateway", "decode", "prefill"))
