"""Reasoning, tools and continued answers through real processes: settings, the model's own template, and generated tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.stack import Stack
from tests.e2e.tiny import save_tokenizer
from tests.fixtures.nats import LocalNatsServer
from tests.models.oracles import build, save

MODEL = "thinker"
AUTO, PLAIN = "gateway-0", "gateway-plain"
# letters that the tokenizer knows; the prompt opens reasoning
TEMPLATE = """{% if tools %}{{ 'PPPP' }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}
{%- for m in messages %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'AB<think>' }}{% endif %}{# <tool_call> #}"""
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "CDEF"}],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "logit_bias": {"254": -100, "255": -100},  # the model never closes it
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "ABAB", "parameters": {"type": "object"}}}]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A gateway that goes by the template, and one that is told to read answers as text."""
    folder = tmp_path_factory.mktemp("answers")
    model = folder / MODEL
    save(build("llama"), model)
    save_tokenizer(model, "<think>", "</think>")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    server = LocalNatsServer(folder / "nats")
    server.start()
    try:
        engine = ("--dtype", "float32", "--num-blocks", "60")
        async with Stack(server.url, folder, flags=("--model", str(model)), engine_flags=engine) as stack:
            await stack.start("gateway")
            await stack.start("gateway", "--reasoning-parser", "none", "--tool-parser", "none", name=PLAIN)
            await stack.start("decode")
            await stack.ready()
            yield stack
    finally:
        server.stop()


async def ask(stack: Stack, gateway: str = AUTO, **more: Any) -> dict[str, Any]:
    response = await stack.client.post(f"{stack.url(gateway)}/v1/chat/completions", json=ASKED | more)
    return response.json()


async def test_reasoning_is_apart_or_text_as_the_setting_says(stack: Stack) -> None:
    apart, plain = await ask(stack), await ask(stack, PLAIN)
    reasoned, said = apart["choices"][0]["message"], plain["choices"][0]["message"]
    assert reasoned["content"] is None and len(reasoned["reasoning_content"]) >= 2
    assert said["content"] == reasoned["reasoning_content"]
    assert apart["usage"]["completion_tokens_details"]["reasoning_tokens"] == 24
    assert "completion_tokens_details" not in plain["usage"]


async def test_a_stream_has_the_same_reasoning(stack: Stack) -> None:
    whole = (await ask(stack))["choices"][0]["message"]["reasoning_content"]
    pieces = [
        choice["delta"].get("reasoning_content", "")
        async for chunk in stack.stream("/v1/chat/completions", {**ASKED, "model": MODEL})
        for choice in chunk["choices"]
    ]
    assert "".join(pieces) == whole


async def test_tools_calls_and_results_are_part_of_the_prompt(stack: Stack) -> None:
    plain = (await ask(stack))["usage"]["prompt_tokens"]
    assert (await ask(stack, tools=TOOLS))["usage"]["prompt_tokens"] == plain + 4
    assert (await ask(stack, tools=TOOLS, tool_choice="none"))["usage"]["prompt_tokens"] == plain
    call = {"id": "call_1", "type": "function", "function": {"name": "ABAB", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "CDEF"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "ABCD"},
    ]
    assert (await ask(stack, messages=messages, tools=TOOLS))["usage"]["prompt_tokens"] == plain + 8


async def test_what_the_gateway_cannot_obey_is_refused(stack: Stack) -> None:
    assert (await ask(stack, PLAIN, tools=TOOLS))["error"]["param"] == "tools"
    assert (await ask(stack, tools=TOOLS, tool_choice="any"))["error"]["param"] == "tool_choice"
    assert (await ask(stack, tools=TOOLS * 10_000))["error"]["param"] == "tools"


async def test_an_answer_that_was_cut_can_be_continued(stack: Stack) -> None:
    begun = [{"role": "user", "content": "CDEF"}, {"role": "assistant", "content": "AB", "prefix": True}]
    whole = (await ask(stack, PLAIN, messages=begun))["choices"][0]["message"]["content"]
    further = [begun[0], {**begun[1], "content": "AB" + whole[:24]}]
    rest = (await ask(stack, PLAIN, messages=further, max_tokens=12))["choices"][0]["message"]["content"]
    assert whole[:24] + rest == whole
