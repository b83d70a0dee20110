"""Objectives for first tokens and for the time between tokens: prompts go where they are computed in time, in parts that keep
the streams beside them going; the text is that of transformers all the same."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
import pytest_asyncio

from common.models.source import ModelFiles, resolve
from common.protocol.handles import Role
from common.text.tokenizer import load_tokenizer
from tests.chaos.site import FASTER_ENGINE, SIMULATED_ENGINE, Site, simulated_jobs
from tests.e2e.oracle import Case, Oracle
from tests.e2e.stack import Reply, Stack
from tests.e2e.test_right import check, run
from tests.e2e.tiny import save_tokenizer
from tests.fixtures.nats import LocalNatsServer
from tests.models.oracles import build, save

ROUTES = "penstock_routes_total"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalNatsServer]:
    server = LocalNatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture
async def stack(server: LocalNatsServer, tmp_path: Path) -> AsyncIterator[Stack]:
    folder = tmp_path / "llama"
    save(build("llama"), folder)
    save_tokenizer(folder)
    flags = ("--dtype", "float32", "--token-budget", "128", "--model", str(folder))
    async with Stack(server.url, tmp_path, engine_flags=flags) as stack:
        yield stack


async def routes(stack: Stack) -> dict[str, float]:
    """Attempts sent to workers, by why they took their path."""
    page = (await stack.client.get(f"{stack.url('gateway-0')}/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith(f"{ROUTES}{{")]
    return {line.split('reason="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


@pytest.mark.slow
async def test_prompts_that_prefill_would_be_late_for_give_the_same_text_from_decode(stack: Stack, tmp_path: Path) -> None:
    folder = str(tmp_path / "llama")
    oracle = Oracle(build("llama"), load_tokenizer(resolve(folder)))
    await stack.start("gateway", "--model", folder, "--direct-max-tokens", "8", "--slo-ttft-ms", "1")
    await stack.start("prefill")
    await stack.start("decode", "--slo-itl-ms", "1")
    await stack.start("decode", "--slo-itl-ms", "5", "--speculation-tokens", "4", "--verify", "always")
    await stack.ready()
    rng = random.Random(5)
    lengths = [33, 64, 65, 129, 200, 257, 300, 440] * 2
    cases = [Case([rng.randrange(256) for _ in range(length)], 8 + 5 * i % 41) for i, length in enumerate(lengths)]
    await check(oracle, cases, await run(stack, cases, gateway="gateway-0", spread_s=0.3, model="llama"))
    taken = await routes(stack)
    reasons = ("prefill_would_be_late", "sooner_at_decode", "late_in_a_gap")
    assert sum(taken.get(reason, 0) for reason in reasons) > 0, taken
    # where workers are slow, all wait for gaps, and none is computed by the prefill worker
    assert taken.get("long_uncached_prompt", 0) > 0 or taken.get("late_in_a_gap", 0) > 8, taken
    await stack.clean()


@pytest.mark.slow
async def test_a_prefill_worker_answers_while_no_decode_worker_has_room(stack: Stack, tmp_path: Path) -> None:
    folder = str(tmp_path / "llama")
    oracle = Oracle(build("llama"), load_tokenizer(resolve(folder)))
    await stack.start("gateway", "--model", folder, "--direct-max-tokens", "8", "--slo-ttft-ms", "5000")
    await stack.start("prefill")
    await stack.start("prefill")
    await stack.start("decode", "--max-running", "1")
    await stack.ready()
    rng = random.Random(6)
    sampling = ({}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "frequency_penalty": 0.3, "seed": 4})
    cases = [
        Case([rng.randrange(256) for _ in range(3 + 37 * number % 300)], 30 + number, sampling[number % 3])
        for number in range(16)
    ]
    await check(oracle, cases, await run(stack, cases, gateway="gateway-0", spread_s=0.1, model="llama"))
    taken = await routes(stack)
    assert taken.get("decode_pool_is_full", 0) > 4, taken
    await stack.clean()

    cases = [Case(case.prompt, 120, case.sampling) for case in cases[:8]]  # long enough that heartbeats tell who decodes
    replies = [Reply() for _ in cases]  # one dies while it decodes: the streams go on elsewhere, with the same text
    async with anyio.create_task_group() as group:
        for case, reply in zip(cases, replies, strict=True):
            group.start_soon(lambda case=case, reply=reply: stack.complete(reply=reply, model="llama", **case.body))
        with anyio.fail_after(20):
            while True:
                busiest = max(("prefill-0", "prefill-1"), key=lambda name: stack.presence(name).running)
                if stack.presence(busiest).running >= 2 and any(len(reply.times) > 3 for reply in replies):
                    break
                await anyio.sleep(0.005)
        stack.kill(busiest)
    await check(oracle, cases, replies)
    await stack.clean()


async def test_streams_beside_a_long_prompt_keep_their_pace(
    server: LocalNatsServer, tmp_path: Path, smollm2: ModelFiles
) -> None:
    """On the simulated engine, whose times are those of a large GPU: a prompt of 4,000 tokens takes it half a second."""
    flags = (*SIMULATED_ENGINE, "--token-budget", "8192")
    gaps: dict[str, float] = {}
    async with Stack(server.url, tmp_path, engine_flags=flags) as stack:
        await stack.start("gateway")
        for name, more in {"free": (), "kept": ("--slo-itl-ms", "60")}.items():
            await stack.start("decode", *more, name=f"decode-{name}")
            await stack.ready()
            site = Site(stack, server, simulated_jobs(smollm2, tokens=range(100, 110)), clients=2)
            async with site.crowd() as crowd:
                await crowd.streaming()
                for first in range(3):
                    prompt = [(first + index) % 40_000 for index in range(3, 4003)]
                    await stack.complete(prompt, max_tokens=1, ignore_eos=True)
            crowd.check()
            gaps[name] = sorted(late - early for seen in crowd.seen for early, late in pairwise(seen.reply.times))[-4]
            stack.kill(f"decode-{name}")
            await anyio.sleep(0.1)
    assert gaps["kept"] < 0.6 * gaps["free"], gaps


@pytest.mark.parametrize("roles", [pytest.param(("decode",), marks=pytest.mark.slow), ("prefill", "decode")])
async def test_a_short_prompt_does_not_wait_behind_a_long_one_that_has_no_place(
    server: LocalNatsServer, tmp_path: Path, roles: tuple[Role, ...]
) -> None:
    flags = (*SIMULATED_ENGINE, "--num-blocks", "100")
    async with Stack(server.url, tmp_path, engine_flags=flags) as stack:
        await stack.start("gateway", "--direct-max-tokens", "8")
        for role in roles:
            await stack.start(role)
        await stack.ready()
        took: dict[str, float] = {}

        async def ask(name: str, prompt: list[int], max_tokens: int) -> None:
            began = time.monotonic()
            reply = await stack.complete(prompt, max_tokens=max_tokens, ignore_eos=True)
            assert reply.error is None and reply.finish == "length", reply
            took[name] = time.monotonic() - began

        async with anyio.create_task_group() as group:
            group.start_soon(ask, "first", list(range(10, 1010)), 200)
            await anyio.sleep(1.0)
            group.start_soon(ask, "long", list(range(20, 1120)), 8)
            await anyio.sleep(0.5)
            for number in range(3):
                await ask(f"short {number}", list(range(30 + number, 90 + number)), 4)
        assert max(seconds for name, seconds in took.items() if name.startswith("short")) < 1.0, took
        logging.getLogger("e2e").info("%s", took)
        assert took["long"] > took["short 0"]
        await stack.clean()


@pytest.mark.slow
async def test_a_long_prompt_gets_its_place_although_short_ones_keep_coming(server: LocalNatsServer, tmp_path: Path) -> None:
    flags = (*FASTER_ENGINE, "--num-blocks", "100")
    async with Stack(server.url, tmp_path, engine_flags=flags) as stack:
        await stack.start("gateway")
        await stack.start("decode")
        await stack.ready()
        ended = anyio.Event()

        async def short(number: int) -> None:
            while not ended.is_set():
                await stack.complete(list(range(number, number + 100)), max_tokens=30, ignore_eos=True)

        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(short, 30 + 200 * number)
            await anyio.sleep(1.0)
            with anyio.fail_after(30):
                reply = await stack.complete(list(range(20, 1420)), max_tokens=4, ignore_eos=True)
            assert reply.error is None
            ended.set()


async def test_prompts_that_are_late_let_a_later_one_pass_that_is_in_time(server: LocalNatsServer, tmp_path: Path) -> None:
    """A prompt of 4,000 tokens takes half a second, and the objective is 1.6 s: of eight that come at once three keep it, of
    the others one runs when a ninth comes."""
    flags = (*SIMULATED_ENGINE, "--token-budget", "8192", "--kv-cache-mb", "64")
    async with Stack(server.url, tmp_path, engine_flags=flags) as stack:
        await stack.start("gateway", "--slo-ttft-ms", "1600")
        await stack.start("decode")
        await stack.ready()
        took: dict[str, float] = {}

        async def ask(name: str, first: int) -> None:
            began = time.monotonic()
            prompt = [(first * 4000 + index) % 40_000 for index in range(4000)]
            reply = await stack.complete(prompt, max_tokens=2, ignore_eos=True)
            assert reply.error is None and reply.finish == "length", reply
            took[name] = reply.times[0] - began

        for first in range(2):  # so that it is known how long prompts take
            await ask("warm", first)
        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(ask, f"old {number}", 2 + number)
            await anyio.sleep(1.8)
            await ask("new", 10)
            assert sum(name.startswith("old") for name in took) < 8, took
        logging.getLogger("e2e").info("%s", took)
        assert took["new"] < 1.6 and sum(seconds < 1.6 for name, seconds in took.items() if name != "warm") >= 3, took
        taken = await routes(stack)
        assert taken.get("late_in_a_gap", 0) >= 3, taken
        await stack.clean()
