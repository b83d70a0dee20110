"""The draft model that is shipped, in real processes: `--draft-model auto` finds it, and no token of an answer changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from common.models.draft_folder import draft_spec
from common.models.source import DEFAULT_MODEL, ModelFiles, default_cache_dir
from tests.e2e.stack import Stack
from tests.e2e.test_right import counted
from tests.fixtures.nats import LocalNatsServer

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

QUESTION = "Write a polite letter to my landlord about a broken heater."
KV = ("--kv-cache-mb", "64")
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


async def answer(stack: Stack) -> str:
    said = [{"role": "user", "content": QUESTION}]
    body = {"messages": said, "temperature": 0, "max_tokens": 32}
    events = [event async for event in stack.stream("/v1/chat/completions", body)]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


async def test_auto_finds_the_shipped_draft_model_whose_drafts_hold_and_change_no_token(
    smollm2: ModelFiles, tmp_path: Path, nats_server_factory: Callable[[], LocalNatsServer]
) -> None:
    name = Path(draft_spec("auto", DEFAULT_MODEL)).name
    home = tmp_path / "home"
    home.mkdir()
    (home / "models").symlink_to(default_cache_dir() / "models")
    async with Stack(nats_server_factory().url, tmp_path, engine_flags=KV) as stack:
        await stack.start("gateway")
        # floats take longer than 8 bits, so that drafts come in time
        await stack.start("decode", "--dtype", "float32", "--verify", "always", "--lookup", "off", "--head", "off")
        await stack.ready()
        without = await answer(stack)
        flags = ("--draft-model", "auto", "--threads", "1", *KV)
        draft = await stack.start("draft", *flags, environment={"PENSTOCK_HOME": str(home)})
        await stack.ready()
        assert stack.presence(draft).drafting.model == name
        with anyio.fail_after(60):  # how many drafts come in time depends on the machine
            while await counted(stack, "decode", ACCEPTED) < 3:
                assert await answer(stack) == without != ""
        page = (await stack.client.get(f"{stack.url('decode-0')}/metrics")).text
        assert f'draft_model="{name}"' in page
