"""The dashboard of a gateway with two models, in a real browser: both are shown, either can be asked, and tools are called."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from common.models.source import ModelFiles
from tests.e2e.browser import Browser, Page, needs_chromium
from tests.e2e.stack import ROOT, Stack

CLIENTS = ROOT / "tests/clients"
LIVE = "document.querySelector('#live').textContent === 'live'"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
    pytest.mark.browser,
    pytest.mark.slow,
    needs_chromium,
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(nats_server: str, smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("page")
    with_tools = folder / "caller.gguf"
    command = [sys.executable, str(CLIENTS / "with_template.py"), str(CLIENTS / "tools_template.jinja"), str(with_tools)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    served = {"plain": smollm2.name, "caller": str(with_tools)}
    config = folder / "models.toml"
    tables = [f'[[models]]\nmodel = "{model}"\nserved_model_name = ["{name}"]\n' for name, model in served.items()]
    config.write_text("\n".join(tables))
    async with Stack(nats_server, folder, engine_flags=("--kv-cache-mb", "128")) as stack:
        await stack.start("gateway", "--config", str(config))
        for name, model in served.items():
            await stack.start("decode", "--model", model, "--served-model-name", name, name=f"decode-{name}")
        await stack.ready(within_s=150)
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def page(stack: Stack, tmp_path: Path) -> AsyncIterator[Page]:
    """The page of the gateway, with nothing wrong in it at the end."""
    async with Browser(tmp_path / "profile") as browser:
        page = await browser.open(f"{stack.url()}/")
        await page.resize(1600, 1000)
        await page.until(LIVE)
        await page.evaluate("document.querySelector('.chat details').open = true")
        await page.evaluate("document.querySelector('#chat-temperature').value = 0")
        yield page
        assert page.errors == []
        await page.close()


async def choose(page: Page, select: str, value: str) -> None:
    await page.evaluate(f"document.querySelector('{select}').value = '{value}'")
    assert await page.evaluate(f"document.querySelector('{select}').value") == value


async def ask(page: Page, text: str) -> None:
    """Send `text`, and wait for the answer's end."""
    before = await page.evaluate("document.querySelectorAll('#chat-log .facts').length")
    await page.type("#chat-input", text)
    await page.press("Enter", 13)
    await page.until(f"document.querySelectorAll('#chat-log .facts').length > {before}", within_s=60)


async def test_both_models_are_shown_and_either_is_asked(page: Page) -> None:
    await page.until("document.querySelectorAll('#workers tbody tr').length === 2")
    rows = await page.text("#workers")
    assert "decode-plain" in rows and "decode-caller" in rows
    pools = await page.text("#pools")
    assert "Decode · plain" in pools and "Decode · caller" in pools
    assert await page.evaluate("[...document.querySelector('#chat-model').options].map(option => option.value)") == [
        "plain",
        "caller",
    ]
    for name in ("caller", "plain"):
        await choose(page, "#chat-model", name)
        await ask(page, "Say hello.")
        await page.until(f"document.querySelector('#timeline').innerText.includes('{name}')")


async def test_a_tool_is_called_and_its_result_sent_back(page: Page) -> None:
    await choose(page, "#chat-model", "caller")
    await page.type("#chat-tools", json.dumps([WEATHER]))
    await choose(page, "#chat-tool-choice", "get_weather")
    await ask(page, "What is the weather in Oslo?")
    call = await page.text(".message.assistant .call")
    assert json.loads(call.removeprefix("get_weather").strip("()"))["city"] in ("Paris", "Oslo")
    await choose(page, "#chat-tool-choice", "none")
    await page.type("#chat-log .results textarea", "Snow, -3 degrees.")
    await page.click("#chat-log .results button")
    await page.until("document.querySelectorAll('#chat-log .facts').length === 2", within_s=60)
    assert await page.evaluate("document.querySelector('#chat-log .results').disabled")
    sent = await page.evaluate("[...document.querySelectorAll('.message')].length")
    assert sent == 3, "the question, the call, and the answer"
