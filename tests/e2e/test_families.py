"""Greedy text is transformers' for every family, in contexts several times its window, whatever way a request takes: handed
off, moved to another worker in mid-answer, begun from a kvstore or from a prefix, and with guesses that are verified."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from common.models.source import resolve
from common.text.tokenizer import load_tokenizer
from tests.e2e.oracle import Case, Oracle
from tests.e2e.stack import Reply, Stack
from tests.e2e.test_right import cached, check, counted, run, run_alone
from tests.e2e.tiny import save_tokenizer
from tests.fixtures.slow import some_slow
from tests.models.oracles import FAMILIES, build, save

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

TWO_GROUPS = ("gemma2", "gemma3", "qwen2-windows-in-last-layers", "olmo3", "ministral", "exaone4", "cwm", "gpt-oss", "llama4")
BLOCK_TOKENS = 16
FLAGS = ("--dtype", "float32", "--token-budget", "50", "--num-blocks", "120")
DECODERS = ("decode-0", "decode-1")
SPECULATION = ("--speculation-tokens", "4", "--verify", "always")


def prompts_of(dice: random.Random, *lengths: int) -> list[list[int]]:
    return [[dice.randrange(256) for _ in range(length)] for length in lengths]


def model_of(name: str, directory: Path) -> tuple[Path, Oracle]:
    """A tiny model with random weights in a folder of its name, and what transformers makes of it."""
    folder, model = directory / name, build(name)
    save(model, folder)
    save_tokenizer(folder)
    return folder, Oracle(model, load_tokenizer(resolve(str(folder))))


@pytest.mark.parametrize("name", some_slow(FAMILIES, quick=("gpt-oss",)))
async def test_a_family_is_served_as_transformers_computes_it(name: str, nats_server: str, tmp_path: Path) -> None:
    folder, oracle = model_of(name, tmp_path)
    dice = random.Random(name)
    async with Stack(nats_server, tmp_path, flags=("--model", str(folder)), engine_flags=FLAGS) as stack:
        await stack.start("gateway", "--direct-max-tokens", "-1")
        for role in ("kvstore", "prefill"):
            await stack.start(role)
        await stack.start("decode", *SPECULATION)
        await stack.ready()
        assert len(stack.presence("decode-0").kv.groups) == (2 if name in TWO_GROUPS else 0)

        handed = [Case(prompt, 40) for prompt in prompts_of(dice, 1, 16, 40, 150, 205)]
        await check(oracle, handed, await run(stack, handed, gateway="gateway-0", spread_s=0.2, model=name))
        assert "pull_failed" not in stack.log("decode-0"), "decode computed again what prefill had computed"
        await a_killed_worker(stack, name, oracle, Case(prompts_of(dice, 130)[0], 300))
        await a_prefix_from_the_store(stack, name, oracle, prompts_of(dice, 150)[0])
        await prefixes(stack, name, oracle, prompts_of(dice, 130, 60))
        await guesses(stack, name, oracle, prompts_of(dice, 9, 14))
        await stack.clean()


async def test_chunks_and_prefixes_in_one_worker(nats_server: str, tmp_path: Path) -> None:
    """Prompts of several chunks of attention, computed where they are decoded."""
    folder, oracle = model_of("llama4", tmp_path)
    async with Stack(nats_server, tmp_path, flags=("--model", str(folder)), engine_flags=FLAGS) as stack:
        await stack.start("gateway")
        await stack.start("decode")
        await stack.ready()
        await prefixes(stack, "llama4", oracle, prompts_of(random.Random(4), 130, 60))
        await stack.clean()


async def a_killed_worker(stack: Stack, name: str, oracle: Oracle, case: Case) -> None:
    """Another goes on in mid-answer, far behind what the first one's windows kept."""
    await stack.start("decode", *SPECULATION)
    await stack.ready("decode-1")
    killed = False
    for _ in range(5):  # an answer may be complete before its worker's next heartbeat
        reply = Reply()
        async with anyio.create_task_group() as group:
            group.start_soon(lambda reply=reply: stack.complete(reply=reply, model=name, **case.body))
            with anyio.fail_after(30):
                while not killed and reply.finish is None:
                    busy = [worker for worker in DECODERS if stack.presence(worker).running]
                    if busy and len(reply.times) >= 40:
                        stack.kill(busy[0])
                        killed = True
                    await anyio.sleep(0.001)
        await check(oracle, [case], [reply])
        if killed:
            return
    raise AssertionError("nobody was seen at work")


async def a_prefix_from_the_store(stack: Stack, name: str, oracle: Oracle, prompt: list[int]) -> None:
    """The worker that computed it is gone, and the one that is left has never seen it."""
    await run_alone(stack, [Case(prompt, 1)], gateway="gateway-0", model=name)
    stack.send_signal("prefill-0", signal.SIGTERM)
    assert await stack.ended("prefill-0") == 0
    case = Case(prompt, 40)
    replies = await run_alone(stack, [case], gateway="gateway-0", model=name)
    await check(oracle, [case], replies)
    assert cached(replies) == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert await counted(stack, "decode", "penstock_store_fetched_blocks_total") > 0


async def prefixes(stack: Stack, name: str, oracle: Oracle, prompts: Sequence[list[int]]) -> None:
    """The same prompt twice, one that goes on behind it, and one that leaves it halfway; all in one worker."""
    first, other = prompts
    cases = [Case(prompt, 40) for prompt in (first, first, first + other, first[:100] + other)]
    replies = await run_alone(stack, cases, gateway="gateway-0", model=name)
    await check(oracle, cases, replies)
    assert [cached([reply]) for reply in replies] == [0, 128, 128, 96]


async def guesses(stack: Stack, name: str, oracle: Oracle, patterns: Sequence[list[int]]) -> None:
    """What repeats itself is guessed rightly, and what only seems to is not. Long answers of tiny models repeat themselves."""
    await stack.ready(await stack.start("draft"))
    cases = [Case(pattern * count, num_tokens) for pattern in patterns for count, num_tokens in ((3, 250), (12, 60))]
    await check(oracle, cases, await run(stack, cases, gateway="gateway-0", spread_s=0.2, model=name))
    proposed = await counted(stack, "decode", "vllm:spec_decode_num_draft_tokens_total")
    accepted = await counted(stack, "decode", "vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= proposed
