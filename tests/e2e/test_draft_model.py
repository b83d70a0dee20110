"""A draft model in real processes: it changes no token, its drafts are accepted, and its death goes unnoticed."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file, save_file

from tests.e2e.stack import Reply, Stack
from tests.e2e.test_right import counted
from tests.fixtures.nats import LocalNatsServer
from tests.fixtures.tiny_model import edit_config, write_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

PROMPTS = ([1, 2, 3], list(range(60, 160)), [7] * 20)
PROPOSED = "vllm:spec_decode_num_draft_tokens_total"
SAMPLED = {"temperature": 0.8, "seed": 5, "top_p": 0.95}


LAYERS = 40


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft model."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def model(small: Path) -> Path:
    """The target: the draft model with layers behind its own that add nothing, so that it takes longer for the same tokens."""
    folder = small.with_name("tiny")
    shutil.copytree(small, folder)
    tensors = load_file(folder / "model.safetensors")
    own = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
    for layer in range(2, LAYERS):
        for name, tensor in own.items():
            silent = name.endswith(("o_proj.weight", "down_proj.weight"))
            tensors[name.replace(".1.", f".{layer}.", 1)] = np.zeros_like(tensor) if silent else tensor
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, num_hidden_layers=LAYERS)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A gateway and a decode worker."""
    engine = ("--dtype", "float32", "--num-blocks", "200")
    directory = tmp_path_factory.mktemp("stack")
    server = LocalNatsServer(directory / "nats")
    server.start()
    try:
        async with Stack(server.url, directory, flags=("--model", str(model)), engine_flags=engine) as stack:
            await stack.start("gateway")
            await stack.start("decode", "--verify", "always", "--lookup", "off", "--head", "off")
            await stack.ready()
            yield stack
    finally:
        server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def without(shared_stack: Stack) -> list[str]:
    """The answers before there was a draft worker."""
    return await answers(shared_stack)


@pytest_asyncio.fixture(loop_scope="module")
async def stack(shared_stack: Stack, without: list[str]) -> AsyncIterator[Stack]:
    """Without a draft worker when a test begins."""
    yield shared_stack
    for name in [name for name in shared_stack.processes if name.startswith("draft")]:
        shared_stack.kill(name)


async def start_draft(stack: Stack, model: Path, *flags: str) -> str:
    own = ("--draft-model", str(model), "--dtype", "float32", "--threads", "1", "--num-blocks", "200", *flags)
    name = await stack.start("draft", *own)
    await stack.ready(name)
    return name


async def answers(stack: Stack, num_tokens: int = 60) -> list[str]:
    """The text of each prompt, greedy and sampled, all at the same time."""
    replies = [Reply() for _ in range(2 * len(PROMPTS))]
    async with anyio.create_task_group() as group:
        for index, reply in enumerate(replies):
            body = {"model": "tiny", "max_tokens": num_tokens, "ignore_eos": True, **(SAMPLED if index % 2 else {})}

            async def ask(index: int = index, reply: Reply = reply, body: dict[str, Any] = body) -> None:
                await stack.complete(PROMPTS[index // 2], reply=reply, **body)

            group.start_soon(ask)
    assert all(reply.finish == "length" for reply in replies), replies
    return [reply.text for reply in replies]


async def test_drafts_of_the_targets_own_weights_are_accepted_and_change_no_token(
    stack: Stack, small: Path, without: list[str]
) -> None:
    draft = await start_draft(stack, small)
    await anyio.sleep(0.5)  # heartbeats: until the decode worker knows of it
    assert await answers(stack) == without
    accepted = await counted(stack, "decode", "vllm:spec_decode_num_accepted_tokens_total")
    proposed = await counted(stack, "decode", PROPOSED)
    assert accepted == proposed > 20
    assert await counted(stack, "draft", "penstock_draft_model_tokens_total") >= accepted
    assert await counted(stack, "draft", "penstock_draft_model_steps_total") > 0
    await stack.clean()
    assert stack.presence(draft).vocabulary


@pytest.mark.slow
async def test_a_killed_draft_worker_changes_nothing(stack: Stack, small: Path) -> None:
    undisturbed = await answers(stack, 200)
    draft = await start_draft(stack, small)
    found: list[str] = []

    async def ask() -> None:
        found.extend(await answers(stack, 200))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        with anyio.fail_after(30):
            while stack.presence(draft).running < 2:
                assert not found, "nothing was mirrored"
                await anyio.sleep(0.005)
        stack.send_signal(draft, signal.SIGSTOP)
        await anyio.sleep(0.1)
        stack.kill(draft)
    assert found == undisturbed
    await stack.clean()


async def test_another_tokenizer_turns_speculation_off_and_serving_goes_on(
    stack: Stack, tmp_path: Path, without: list[str]
) -> None:
    before = await counted(stack, "decode", PROPOSED)
    other = write_tiny_model(tmp_path / "other")
    said = json.loads((other / "tokenizer.json").read_text())
    vocabulary = said["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(said))
    near = await start_draft(stack, other)
    far = await start_draft(stack, other, "--model", str(other), "--served-model-name", "tiny")
    assert stack.presence(near).credits == 0 and "has another tokenizer than" in stack.log(near)
    assert stack.presence(far).credits > 0, "where the target's files are not, only the decode worker can tell"
    await anyio.sleep(0.5)
    assert await answers(stack) == without
    assert await counted(stack, "decode", PROPOSED) == before
    assert stack.presence(far).running == 0


async def test_a_draft_model_that_cannot_be_opened_is_one_line_in_the_log_and_serving_goes_on(
    stack: Stack, small: Path, tmp_path: Path
) -> None:
    """Each draft worker stays, since another start would end in the same way, and takes no sequences."""
    before = await counted(stack, "decode", PROPOSED)
    cut = shutil.copytree(small, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    expected = {
        await start_draft(stack, tmp_path / "nowhere"): "nowhere",
        await start_draft(stack, cut.parent): "model.safetensors",
        await start_draft(stack, small, "--num-blocks", "0", "--kv-cache-mb", str(1 << 26)): "kv_cache_mb",  # 64 TiB
    }
    await anyio.sleep(0.5)
    assert all(text for text in await answers(stack))
    assert await counted(stack, "decode", PROPOSED) == before
    for name, reason in expected.items():
        lines = [line for line in stack.log(name).splitlines() if "draft_model_unusable" in line]
        assert len(lines) == 1 and reason in lines[0], stack.log(name)
        assert stack.presence(name).credits == 0
