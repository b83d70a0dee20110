"""`penstock bench --speculation` against real processes: what it says, the plot, and what it refuses before any load."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest
import pytest_asyncio

from common.runtime.api_keys import lines_for, new_key
from tests.e2e.stack import ROOT, Stack
from tests.e2e.test_right import counted
from tests.fixtures.nats import LocalNatsServer
from tests.fixtures.tiny_model import write_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

LOAD = ("--requests", "4", "--concurrency", "2", "--max-tokens", "60", "--prompt-words", "12")
GENERATED = "penstock_engine_generation_tokens_total"
KEY = "a-key-of-this-test"


@contextlib.asynccontextmanager
async def gateway(directory: Path) -> AsyncIterator[Stack]:
    """A gateway, which has no decode worker yet."""
    model = write_tiny_model(directory / "tiny")
    engine = ("--dtype", "float32", "--num-blocks", "400")
    server = LocalNatsServer(directory / "nats")
    server.start()
    try:
        async with Stack(server.url, directory, flags=("--model", str(model)), engine_flags=engine) as stack:
            await stack.start("gateway", environment={"PENSTOCK_API_KEY": KEY})
            yield stack
    finally:
        server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """With a decode worker that looks up, and a draft worker, which the last of these tests kills."""
    async with gateway(tmp_path_factory.mktemp("stack")) as stack:
        await stack.start("decode", "--verify", "always", "--lookup", "on")
        await stack.start("draft")
        await stack.ready()
        yield stack


async def bench(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "common.cli", "bench", *LOAD, *words]
        return subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=90, check=False
        )

    return await anyio.to_thread.run_sync(run)


@pytest.mark.slow
async def test_what_lookup_and_a_draft_worker_gave(stack: Stack, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (await bench("--nats-url", stack.nats_url)).returncode == 0  # what was before does not count
    earlier = await counted(stack, "decode", "penstock_speculation_accepted_tokens_total")

    plot = tmp_path / "acceptance.png"
    said = await bench("--nats-url", stack.nats_url, "--speculation", "--json", "--plot", str(plot))
    assert said.returncode == 0 and said.stderr == "", said.stderr
    found = json.loads(said.stdout)
    (worker,) = found["speculation"]["decode_workers"]
    assert (worker["model"], worker["worker"]) == ("tiny", "decode-0")
    assert worker["generated_tokens"] == found["generated_tokens"] == 240
    lookup = worker["drafters"]["lookup"]
    assert 0 < lookup["accepted_tokens"] <= lookup["verified_tokens"]
    assert lookup["acceptance"] == round(lookup["accepted_tokens"] / lookup["verified_tokens"], 4)
    assert 1 <= len(lookup["acceptance_by_position"]) <= 8 and all(0 <= x <= 1 for x in lookup["acceptance_by_position"])
    assert worker["tokens_per_step"] > 1
    assert worker["steps_saved"] == sum(one["accepted_tokens"] for one in worker["drafters"].values())
    accepted = await counted(stack, "decode", "penstock_speculation_accepted_tokens_total")
    assert worker["steps_saved"] == accepted - earlier
    assert set(worker) >= {"draft_worker_proposals", "outcome_tables", "probing", "head"}
    assert worker["probing"]["engine_steps"] > 0
    (draft,) = found["speculation"]["draft_workers"]
    assert draft["worker"] == "draft-0" and 0 < draft["busy_share"] <= 1
    assert found["speculation"]["unread_workers"] == []
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    over_http = ("--url", stack.url(), "--speculation")
    said = await bench(*over_http, PENSTOCK_API_KEY=KEY)
    assert said.returncode == 0, said.stderr
    for part in ("decode-0, tiny", "lookup", "tokens a step of a sequence", "steps saved", "draft-0"):
        assert part in said.stdout, said.stdout


async def test_a_gateway_that_requires_keys_is_asked_with_the_key_everywhere(stack: Stack, tmp_path: Path) -> None:
    operator, tenant = new_key(), new_key()
    keys = tmp_path / "keys.toml"
    known = ["operator"]
    table = "[tenants.operator]\ndashboard = true\n"
    keys.write_text(table + lines_for(operator, "operator", known=known) + lines_for(tenant, "acme", known=known))
    several = await stack.start("gateway", "--api-keys", str(keys))
    await stack.ready(several)
    for asked, key in (("gateway-0", KEY), (several, operator)):
        said = await bench("--url", stack.url(asked), "--api-key", key, "--speculation", "--json")
        assert said.returncode == 0, said.stderr
        (worker,) = json.loads(said.stdout)["speculation"]["decode_workers"]
        assert worker["generated_tokens"] == 240 and worker["drafters"]["lookup"]["accepted_tokens"] > 0
    before = await counted(stack, "decode", GENERATED)
    for asked, key, reason in (
        ("gateway-0", "", "wants an API key"),
        ("gateway-0", "wrong", "wants an API key"),
        (several, tenant, "its tenant needs `dashboard = true`, or leave out --speculation"),
    ):
        said = await bench("--url", stack.url(asked), "--api-key", key, "--speculation", "--model", "tiny")
        assert said.returncode == 1 and reason in said.stderr and len(said.stderr.splitlines()) == 1, said.stderr
    assert await counted(stack, "decode", GENERATED) == before, "nothing was generated"


@pytest.mark.slow
async def test_a_draft_worker_that_dies_during_the_load_is_named(stack: Stack) -> None:
    draft = "draft-0"
    before = await counted(stack, "decode", GENERATED)
    ended: list[subprocess.CompletedProcess[str]] = []

    async def measure() -> None:
        ended.append(await bench("--nats-url", stack.nats_url, "--speculation", "--json", "--requests", "200"))

    async with anyio.create_task_group() as group:
        group.start_soon(measure)
        with anyio.fail_after(30):
            while await counted(stack, "decode", GENERATED) < before + 300:
                await anyio.sleep(0.02)
        stack.kill(draft)
    (said,) = ended
    found = json.loads(said.stdout)["speculation"]
    assert said.returncode == 0 and found["unread_workers"] == [draft] and found["draft_workers"] == []
    assert found["decode_workers"][0]["generated_tokens"] == 200 * 60
    (line,) = said.stderr.splitlines()
    assert draft in line


@pytest_asyncio.fixture(loop_scope="module")
async def lone_gateway(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway(tmp_path) as stack:
        yield stack


async def test_what_it_refuses_before_any_load(lone_gateway: Stack, tmp_path: Path) -> None:
    stack = lone_gateway
    pytest.importorskip("matplotlib")
    here = ("--nats-url", stack.nats_url, "--speculation")

    async def refused(*words: str, **environment: str) -> str:
        said = await bench(*here, *words, **environment)
        assert said.returncode == 1 and said.stdout == "", said.stdout + said.stderr
        (line,) = said.stderr.splitlines()
        return line

    with anyio.fail_after(30):
        while stack.state("gateway-0") == "silent":
            await anyio.sleep(0.05)
    assert "no decode worker here serves metrics" in await refused("--model", "tiny")
    await stack.start("decode", "--lookup", "off")
    await stack.ready()
    before = await counted(stack, "decode", GENERATED)
    assert "no decode worker speculates: start Penstock with --lookup on" in await refused()
    assert "take .png, .svg or .pdf" in await refused("--plot", str(tmp_path / "a.xyz"))
    assert "can't be written: No such file or directory" in await refused("--plot", str(tmp_path / "no" / "a.png"))
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "matplotlib.py").write_text("raise ImportError\n")
    line = await refused("--plot", str(tmp_path / "a.png"), PYTHONPATH=f"{blocked}:{ROOT}")
    assert "a plot needs matplotlib: pip install 'penstock[bench]'" in line
    assert await counted(stack, "decode", GENERATED) == before, "nothing was generated"


async def test_nobody_on_the_bus(nats_server_factory: Callable[..., LocalNatsServer]) -> None:
    said = await bench("--nats-url", nats_server_factory().url, "--speculation", "--model", "tiny")
    assert said.returncode == 1 and "no worker on this bus: start some with `penstock up`" in said.stderr
    assert len(said.stderr.splitlines()) == 1
