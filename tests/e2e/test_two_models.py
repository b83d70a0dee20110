"""Two models on one bus, as real processes: each request gets its own model's answer, and one kvstore serves both."""

from __future__ import annotations

import json
import random
import shutil
import string
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import pytest_asyncio

from common.cli.client import ChatStream
from common.engine.simulated.runner import TokenRule, expected_tokens
from common.models.source import ModelFiles, resolve
from common.protocol import headers, subjects
from common.protocol.errors import UnknownModel
from common.protocol.messages import SamplingParams
from common.runtime.bus import Bus, BusMessage
from common.runtime.nats_bus import connect
from common.runtime.routing import is_no_responders
from common.text.bundle import TextBundle, load_bundle
from common.worker.fetch_rate import FORGET_S
from tests.e2e.stack import ROOT, Stack
from tests.e2e.tiny import save_tokenizer
from tests.models.oracles import build, save

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SMOLLM2 = "smollm2-135m-instruct"
NUM_REQUESTS = 40
NUM_PROMPTS = 5
PROMPT_TOKENS = 161
NUM_TOKENS = 4


@dataclass
class Site:
    """`prompts[model]`: what is asked of each, `expected(model, prompt)` what must come, where that is known beforehand."""

    stack: Stack
    bus: Bus
    prompts: dict[str, list[list[int]]]
    expected: Callable[[str, list[int]], str] | None

    async def over_http(self, model: str, prompt: list[int]) -> str:
        reply = await self.stack.complete(prompt, gateway=f"gateway-{model}", model=model, **body())
        assert (reply.error, reply.finish) == (None, "length"), reply
        return reply.text

    async def over_nats(self, model: str, prompt: list[int]) -> str:
        replies = await self.ask(model, {"model": model, "prompt": prompt, "temperature": 0, "stream": False, **body()})
        (last,) = replies
        assert headers.ERROR_CODE not in last.headers, last.data
        answer = json.loads(last.data)
        assert answer["model"] == model
        return answer["choices"][0]["text"]

    async def ask(self, model: str, request: dict[str, Any]) -> list[BusMessage]:
        """Replies to one completion request, up to the last."""
        replies: list[BusMessage] = []
        inbox = self.bus.new_inbox()
        subscription = await self.bus.subscribe(inbox, replies.append)
        await self.bus.publish(subjects.completions(subjects.slug(model)), json.dumps(request).encode(), reply=inbox)
        with anyio.fail_after(30):
            while not replies or not (headers.FINAL in replies[-1].headers or is_no_responders(replies[-1])):
                await anyio.sleep(0.005)
        await subscription.unsubscribe()
        return replies

    async def told(self, verb: str) -> dict[str, dict[str, Any]]:
        """What each gateway answers to `$SRV.<verb>`, by worker."""
        answers: list[Any] = []
        inbox = self.bus.new_inbox()
        subscription = await self.bus.subscribe(inbox, lambda message: answers.append(json.loads(message.data)))
        await self.bus.publish(f"$SRV.{verb}.penstock-gateway", b"", reply=inbox)
        with anyio.fail_after(5):
            while len(answers) < len(self.prompts):
                await anyio.sleep(0.01)
        await subscription.unsubscribe()
        return {answer["metadata"]["worker"]: answer for answer in answers}

    async def counted(self, which: str, metric: str) -> float:
        """A counter, summed over the processes whose names contain `which`."""
        total = 0.0
        for name in [name for name in self.stack.processes if which in name]:
            page = (await self.stack.client.get(f"{self.stack.url(name)}/metrics")).text
            total += sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(metric))
        return total


def body() -> dict[str, Any]:
    return {"max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    # heads of the other model's size, in its groups: kernels are compiled once for both
    save(build("llama", hidden_size=192, head_dim=64, num_attention_heads=6), folder)
    save_tokenizer(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["real", "simulated"])
async def site(
    request: pytest.FixtureRequest,
    nats_server: str,
    tiny: Path,
    smollm2: ModelFiles,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Site]:
    """A gateway and a decode worker for each model, with pools too small for all its prompts, and one kvstore. Simulated
    engines start in no time, so there are prefill workers, too."""
    folder = tmp_path_factory.mktemp(f"two-{request.param}")
    engine = ("--num-blocks", "30", *(("--engine", "simulated") if request.param == "simulated" else ()))
    rng = random.Random(request.param)
    async with Stack(nats_server, folder, engine_flags=engine) as stack:
        for model, path in ((SMOLLM2, smollm2.name), (tiny.name, str(tiny))):
            await stack.start("gateway", "--model", path, "--direct-max-tokens", "-1", name=f"gateway-{model}")
            if request.param == "simulated":
                await stack.start("prefill", "--model", path, name=f"prefill-{model}")
            await stack.start("decode", "--model", path, name=f"decode-{model}")
        await stack.start("kvstore", "--capacity-mb", "128")
        await stack.ready()
        bus = await connect(nats_server, name="two-models")
        bundles = {SMOLLM2: load_bundle(smollm2), tiny.name: load_bundle(resolve(str(tiny)))}
        prose = bundles[SMOLLM2].tokenizer.encode((ROOT / "LICENSE").read_text())
        prompts = {
            SMOLLM2: [prose[200 * i :][:PROMPT_TOKENS] for i in range(NUM_PROMPTS)],
            tiny.name: [[rng.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)],
        }

        def simulated(model: str, prompt: list[int]) -> str:
            return simulated_text(bundles[model], prompt)

        yield Site(stack, bus, prompts, simulated if request.param == "simulated" else None)
        await bus.close()


def simulated_text(bundle: TextBundle, prompt: list[int]) -> str:
    rule = TokenRule(len(bundle.tokenizer.byte_table(skip_special=True)))
    detokenizer = bundle.detokenizer(continues=True)
    tokens = expected_tokens(prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), NUM_TOKENS, rule=rule)
    return detokenizer.push(tokens) + detokenizer.finish()


async def test_requests_that_take_turns_all_get_their_own_models_answer(site: Site) -> None:
    known: dict[tuple[str, int], str] = {}
    for number in range(NUM_REQUESTS):
        for model, prompts in site.prompts.items():
            which = number % NUM_PROMPTS
            over = site.over_nats if number // NUM_PROMPTS % 2 else site.over_http
            text = await over(model, prompts[which])
            if site.expected is not None:
                assert text == site.expected(model, prompts[which])
            assert known.setdefault((model, which), text) == text, "the same prompt, the same text"
            is_tiny = len(text) == 2 * NUM_TOKENS and set(text) <= set(string.ascii_uppercase[:16])
            assert is_tiny == (model != SMOLLM2), "each model has its own letters"
    assert len(set(known.values())) == len(known)
    await site.stack.clean()


async def test_what_the_store_holds_of_both_survives_the_turns(site: Site) -> None:
    before = {model: await site.counted(model, "penstock_store_fetched_blocks_total") for model in site.prompts}
    fetched = dict.fromkeys(site.prompts, 0.0)
    # on a busy machine the store may answer too late, and a worker may find that it computes sooner, until it forgets that
    with anyio.move_on_after(FORGET_S + 60):
        while min(fetched.values()) < 10:
            for which in range(NUM_PROMPTS):
                for model, prompts in site.prompts.items():
                    await site.over_nats(model, prompts[which])
            for model in site.prompts:
                fetched[model] = await site.counted(model, "penstock_store_fetched_blocks_total") - before[model]
    assert min(fetched.values()) >= 10, f"{fetched}: prompts of ten blocks each, which their pools had given up"
    assert await site.counted("kvstore", "penstock_kvstore_arenas") == 2
    assert await site.counted("kvstore", "penstock_kvstore_evicted_blocks_total") == 0


async def test_the_bus_says_who_listens_to_what_and_how_often_that_was_used(site: Site) -> None:
    infos, stats = await site.told("INFO"), await site.told("STATS")
    for model in site.prompts:
        slug = subjects.slug(model)
        listed = {(known["subject"], known["queue_group"]) for known in infos[f"gateway-{model}"]["endpoints"]}
        queue = subjects.GATEWAY_QUEUE
        assert listed >= {(subjects.chat(slug), queue), (subjects.completions(slug), queue), (subjects.any_cancel(), "")}
        assert not any("chat.*" in subject for subject, _ in listed)
        endpoints = {known["name"]: known for known in stats[f"gateway-{model}"]["endpoints"]}
        assert endpoints["completions"]["num_requests"] >= NUM_REQUESTS // 2
        assert endpoints["completions"]["num_errors"] == 0
        assert endpoints["completions"]["average_processing_time"] > 0
        assert endpoints["chat"]["num_requests"] == 0


async def test_a_model_that_nobody_serves_is_known_at_once(site: Site) -> None:
    with anyio.fail_after(5):
        (reply,) = await site.ask("gpt-5", {"prompt": "x"})
    assert is_no_responders(reply)
    with pytest.raises(UnknownModel, match=r"'gpt-5' is not served on this bus; .* are"):
        async with ChatStream(site.bus, "gpt-5", {"messages": []}) as stream:
            await anext(stream)


async def test_a_gateway_whose_models_name_has_a_served_ones_slug_ends_with_a_line(site: Site, tiny: Path) -> None:
    namesake = tiny.with_name("Tiny Llama")
    shutil.copytree(tiny, namesake, dirs_exist_ok=True)
    name = await site.stack.start("gateway", "--model", str(namesake), name="gateway-namesake")
    assert await site.stack.ended(name) == 2
    (line,) = [line for line in site.stack.log(name).splitlines() if line.startswith("penstock gateway: ")]
    assert f"which gateway-{tiny.name} serves, would share the NATS subject" in line and "--served-model-name" in line
    await site.over_nats(tiny.name, site.prompts[tiny.name][0])


async def test_a_gateway_that_ends_leaves_its_model_without_responders_and_the_other_alone(site: Site) -> None:
    (gone, stays) = site.prompts
    site.stack.processes[f"gateway-{gone}"].terminate()
    assert await site.stack.ended(f"gateway-{gone}") == 0
    (reply,) = await site.ask(gone, {"prompt": "x"})
    assert is_no_responders(reply)
    await site.over_nats(stays, site.prompts[stays][0])
