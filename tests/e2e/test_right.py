"""Greedy text is that of transformers in float32, and sampled text depends on the seed alone: through the gateway, over HTTP,
on real processes, whatever way a request takes.

Each class is one topology. Its gateways differ in the path they choose: `prefill` sends every prompt through the prefill
pool, `direct` none. Prompts are token ids: windows of a real text, of lengths around the blocks' and chunks' edges, random
ids, and repetitive text that a drafter guesses well.
"""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import pytest_asyncio

from common.models.source import ModelFiles, resolve
from common.text.tokenizer import Tokenizer, load_tokenizer
from tests.e2e.oracle import Case, Oracle
from tests.e2e.stack import ROOT, Reply, Stack
from tests.e2e.tiny import save_tokenizer
from tests.fixtures.nats import LocalNatsServer
from tests.models.oracles import GREEDY, build, oracle_prompt, save

pytestmark = [pytest.mark.asyncio(loop_scope="class"), pytest.mark.timeout(300)]

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 700, 1500)
TinyModels = dict[str, tuple[Path, Oracle]]
TINY = ("llama", "qwen3")
SAMPLED = (
    {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    {"temperature": 0.8, "top_p": 0.95, "seed": 2},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": 4},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3, "seed": 5},
    {"temperature": 0.9, "logit_bias": {"260": 2.0, "284": -100.0}, "seed": 2**63 - 1},
)
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
REPETITIVE = "one fish, two fish, red fish, blue fish; black fish, blue fish, old fish, new fish. "


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelFiles) -> Tokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def oracle(smollm2_in_transformers: Any, tokenizer: Tokenizer) -> Oracle:
    return Oracle(smollm2_in_transformers, tokenizer)


@pytest.fixture(scope="module")
def alone(tokenizer: Tokenizer) -> list[Case]:
    """A prompt of each length, no two with a common beginning."""
    text = tokenizer.encode((ROOT / "LICENSE").read_text())
    return [Case(text[40 * i :][:length], 16) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def batch(alone: list[Case], tokenizer: Tokenizer) -> list[Case]:
    """32 requests that end raggedly: those of `alone`, random ids, repetitive text, and prompts with a common beginning."""
    rng = random.Random(2)
    text = tokenizer.encode((ROOT / "LICENSE").read_text())
    cases = [Case(case.prompt, 4 + 3 * i % 13) for i, case in enumerate(alone)]
    cases += [Case([rng.randrange(tokenizer.vocab_size) for _ in range(n)], 8 + n % 9) for n in (1, 3, 16, 33, 100)]
    cases += [Case(tokenizer.encode(REPETITIVE * 3)[i:-5], 48 - 4 * i) for i in range(4)]
    shared = text[900:1000]
    cases += [Case(shared[: 20 * i] + text[i * 71 :][: 3 + 9 * i], 24 - 2 * i) for i in range(1, 6)]
    cases += [Case(text[1000 + 60 * i :][: 10 + 8 * i], 32) for i in range(5)]
    assert len(cases) == 32
    return cases


async def run(stack: Stack, cases: Sequence[Case], *, gateway: str, spread_s: float = 1.5, **more: Any) -> list[Reply]:
    """All cases at once, beginning within `spread_s`."""
    replies = [Reply() for _ in cases]

    async def one(index: int) -> None:
        await anyio.sleep(spread_s * (index * 7 % len(cases)) / len(cases))
        await stack.complete(gateway=gateway, reply=replies[index], **{**cases[index].body, **more})

    async with anyio.create_task_group() as group:
        for index in range(len(cases)):
            group.start_soon(one, index)
    return replies


async def run_alone(stack: Stack, cases: Sequence[Case], *, gateway: str, **more: Any) -> list[Reply]:
    """One after the other."""
    return [await stack.complete(gateway=gateway, **{**case.body, **more}) for case in cases]


async def check(oracle: Oracle, cases: Sequence[Case], replies: Sequence[Reply]) -> None:
    """Every reply is what transformers gives."""
    wrong: list[str] = []
    for case, reply in zip(cases, replies, strict=True):
        assert reply.error is None, reply.error
        assert reply.usage is not None
        assert (reply.usage["completion_tokens"], reply.finish) == (case.max_tokens, "length")
        expected = await anyio.to_thread.run_sync(oracle.text, case, reply.text)
        if reply.text != expected:
            wrong.append(f"{len(case.prompt)} prompt tokens, {case.sampling}: {reply.text!r}, not {expected!r}")
    assert not wrong, "\n".join(wrong)


def cached(replies: Sequence[Reply]) -> int:
    """Prompt tokens that came out of a cache."""
    return sum(reply.usage["prompt_tokens_details"]["cached_tokens"] for reply in replies if reply.usage)


async def counted(stack: Stack, role: str, metric: str) -> float:
    """A counter of /metrics, summed over the workers of a role."""
    total = 0.0
    for name in [name for name in stack.processes if name.startswith(role)]:
        page = (await stack.client.get(f"{stack.url(name)}/metrics")).text
        total += sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith((f"{metric} ", f"{metric}{{")))
    return total


@pytest.fixture(scope="class")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of the class's own: the workers of one topology must not meet another's."""
    server = LocalNatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server.url
    server.stop()


async def start_gateways(stack: Stack, *flags: str) -> None:
    await stack.start("gateway", "--direct-max-tokens", "-1", *flags, name="gateway-prefill")
    await stack.start("gateway", "--direct-max-tokens", "100000", *flags, name="gateway-direct")


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def one_and_one(nats_url: str, smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    async with Stack(nats_url, directory, engine_flags=("--dtype", "float32", "--token-budget", "2048")) as stack:
        await start_gateways(stack)
        await stack.start("prefill")
        await stack.start("decode", "--speculation-tokens", "0")
        await stack.ready()
        yield stack


@pytest.mark.slow
class TestOnePrefillOneDecode:
    """Whole prompts in one step, roomy pools, nothing guessed, nobody else's KV."""

    async def test_every_length_alone_with_nothing_cached(self, one_and_one: Stack, oracle: Oracle, alone: list[Case]) -> None:
        replies = await run_alone(one_and_one, alone, gateway="gateway-prefill")
        await check(oracle, alone, replies)
        assert cached(replies) == 0
        assert "pull_failed" not in one_and_one.log("decode-0"), "decode computed again what prefill had computed"

    async def test_an_answer_ends_where_the_model_ends_it(
        self, one_and_one: Stack, oracle: Oracle, tokenizer: Tokenizer
    ) -> None:
        prompt = tokenizer.encode(CHAT, parse_special=True)
        reply = await one_and_one.complete(prompt, gateway="gateway-prefill", max_tokens=100)
        assert reply.usage is not None
        tokens = oracle.tokens(Case(prompt, reply.usage["completion_tokens"]), reply.text)
        assert reply.text == tokenizer.decode(tokens)
        assert reply.finish == "stop"
        assert [token in tokenizer.eos_ids for token in tokens] == [False] * (len(tokens) - 1) + [True]

    async def test_a_ragged_batch_of_32(self, one_and_one: Stack, oracle: Oracle, batch: list[Case]) -> None:
        await check(oracle, batch, await run(one_and_one, batch, gateway="gateway-prefill"))

    async def test_every_length_out_of_the_prefix_cache(self, one_and_one: Stack, oracle: Oracle, alone: list[Case]) -> None:
        replies = await run_alone(one_and_one, alone, gateway="gateway-direct")
        await check(oracle, alone, replies)
        assert cached(replies) > 0.9 * sum(LENGTHS)

    async def test_sampled_text_is_the_same_in_any_company(
        self, one_and_one: Stack, oracle: Oracle, alone: list[Case], batch: list[Case]
    ) -> None:
        sampled = sampled_cases(alone)
        await check(oracle, sampled, await run_alone(one_and_one, sampled, gateway="gateway-prefill"))
        mixed = [*sampled, *batch[13:22]]
        await check(oracle, mixed, await run(one_and_one, mixed, gateway="gateway-direct", spread_s=0.5))
        await one_and_one.clean()


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def two_and_two(nats_url: str, smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with Stack(nats_url, tmp_path_factory.mktemp("stack"), engine_flags=("--dtype", "float32")) as stack:
        await start_gateways(stack)
        await stack.start("draft")
        await stack.start("kvstore")
        await stack.start("prefill", "--token-budget", "48", "--num-blocks", "130")
        await stack.start("prefill", "--token-budget", "100")
        await start_decoders(stack)
        await stack.ready()
        yield stack


async def start_decoders(stack: Stack) -> list[str]:
    return [
        await stack.start(
            "decode", "--token-budget", "40", "--num-blocks", "110", "--speculation-tokens", "3", "--verify", "always"
        ),
        await stack.start("decode", "--token-budget", "130", "--speculation-tokens", "8", "--verify", "always"),
    ]


@pytest.mark.slow
class TestTwoPrefillTwoDecode:
    """Prompts in small chunks, pools that hold one long prompt or many, a drafter, and a store between workers."""

    async def test_a_ragged_batch_of_32_with_guesses(self, two_and_two: Stack, oracle: Oracle, batch: list[Case]) -> None:
        await check(oracle, batch, await run(two_and_two, batch, gateway="gateway-prefill"))
        proposed = await counted(two_and_two, "decode", "vllm:spec_decode_num_draft_tokens_total")
        accepted = await counted(two_and_two, "decode", "vllm:spec_decode_num_accepted_tokens_total")
        assert 0 < accepted < proposed

    @pytest.mark.slow
    async def test_every_length_with_kv_of_other_workers(self, two_and_two: Stack, oracle: Oracle, alone: list[Case]) -> None:
        """Others take the place of those that decoded them, so that nobody has any KV but the store."""
        await check(oracle, alone, await run(two_and_two, alone, gateway="gateway-prefill"))
        leaving = [name for name in two_and_two.processes if name.startswith("decode")]
        await two_and_two.ready(*await start_decoders(two_and_two))
        for name in leaving:
            two_and_two.send_signal(name, signal.SIGTERM)
            assert await two_and_two.ended(name) == 0
        replies = await run_alone(two_and_two, alone, gateway="gateway-direct")
        await check(oracle, alone, replies)
        assert cached(replies) > 0
        assert await counted(two_and_two, "decode", "penstock_store_fetched_blocks_total") > 0

    async def test_a_batch_on_the_direct_path(self, two_and_two: Stack, oracle: Oracle, batch: list[Case]) -> None:
        await check(oracle, batch, await run(two_and_two, batch, gateway="gateway-direct"))

    async def test_a_drafter_and_small_pools_change_no_sampled_text(
        self, two_and_two: Stack, oracle: Oracle, alone: list[Case], batch: list[Case]
    ) -> None:
        mixed = [*sampled_cases(alone), *batch[13:22]]
        for gateway in ("gateway-prefill", "gateway-direct"):
            await check(oracle, mixed, await run(two_and_two, mixed, gateway=gateway, spread_s=0.5))
        await two_and_two.clean()


def sampled_cases(alone: list[Case]) -> list[Case]:
    prompts = [case.prompt for case in alone if len(case.prompt) in (2, 17, 64, 257)]
    return [Case(prompts[i % len(prompts)], 24, sampling) for i, sampling in enumerate(SAMPLED)]


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def tiny_stack(nats_url: str, tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    flags = ("--dtype", "float32", "--num-blocks", "60", "--token-budget", "50")
    async with Stack(nats_url, tmp_path_factory.mktemp("stack"), engine_flags=flags) as stack:
        for name, (folder, _) in tiny.items():
            model = ("--model", str(folder))
            await stack.start("gateway", *model, "--direct-max-tokens", "20", name=f"gateway-{name}")
            await stack.start("prefill", *model)
            await stack.start("decode", *model, "--speculation-tokens", "4", "--verify", "always")
            await stack.start("draft", *model)
        await stack.ready()
        yield stack


@pytest.fixture(scope="class")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    found: TinyModels = {}
    for name in TINY:
        folder = tmp_path_factory.mktemp("tiny") / name
        model = build(name)
        save(model, folder)
        save_tokenizer(folder)
        found[name] = folder, Oracle(model, load_tokenizer(resolve(str(folder))))
    return found


class TestTinyModels:
    """Two models on one bus, each with its own weights, gateways and drafter, and pools for two long prompts."""

    @pytest.mark.parametrize("name", TINY)
    async def test_alone_and_in_a_ragged_batch(self, tiny_stack: Stack, tiny: TinyModels, name: str) -> None:
        rng = random.Random(name)
        lengths = (1, 2, 15, 16, 17, 49, 50, 51, 127, 128, 129, 255, 256, 257, 300, 440)
        prompts = [[rng.randrange(256) for _ in range(length)] for length in lengths]
        cases = [Case(prompt, 48) for prompt in prompts]
        oracle, gateway = tiny[name][1], f"gateway-{name}"
        await check(oracle, cases, await run_alone(tiny_stack, cases, gateway=gateway, model=name))
        ragged = [Case(prompt, 4 + 5 * i % 41) for i, prompt in enumerate([*prompts, *(p[::-1] for p in prompts)])]
        await check(oracle, ragged, await run(tiny_stack, ragged, gateway=gateway, model=name))
        sampled = [Case(prompts[i], 40, sampling) for i, sampling in enumerate(SAMPLED[:5])]
        await check(oracle, sampled, await run(tiny_stack, sampled, gateway=gateway, model=name))
        await tiny_stack.clean()

    async def test_sequences_sent_back_to_wait_give_the_same_text(self, tiny_stack: Stack, tiny: TinyModels) -> None:
        rng = random.Random(3)
        cases = [Case([rng.randrange(256) for _ in range(1 + i % 20)], 64) for i in range(32)]
        for _ in range(6):  # on a busy machine they may come one after the other, and none has to wait
            replies = await run(tiny_stack, cases, gateway="gateway-llama", spread_s=0, model="llama")
            await check(tiny["llama"][1], cases, replies)
            if await counted(tiny_stack, "decode", "vllm:num_preemptions_total") > 0:
                break
        else:
            pytest.fail("nothing was sent back")
        await tiny_stack.clean()

    async def test_a_wrong_guess_does_not_become_the_truth(self, tiny: TinyModels) -> None:
        model, tokens = tiny["llama"][1].model, oracle_prompt()
        fresh = Oracle(model, tiny["llama"][1].tokenizer)
        assert fresh.tokens(Case(tokens, 4), "AAPPAAPP") == GREEDY["llama"]
