"""The dashboard in a real browser, of a whole Penstock with real weights: what somebody who opens `/` sees and can do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator

import anyio
import pytest
import pytest_asyncio

from common.models.source import ModelFiles
from common.protocol import messages, subjects
from tests.e2e.browser import Browser, Page, needs_chromium
from tests.e2e.stack import Stack
from tests.unit.presences import presence

ROLES = ("gateway", "prefill", "decode", "draft", "kvstore")
LIVE = "document.querySelector('#live').textContent === 'live'"
KEY = "a-key-of-its-own"

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(180),
    pytest.mark.browser,
    pytest.mark.slow,
    needs_chromium,
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(nats_server: str, smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("page")
    async with Stack(nats_server, folder, flags=("--model", smollm2.name), engine_flags=("--kv-cache-mb", "256")) as stack:
        for role in (*ROLES, "decode"):
            await stack.start(role)
        await stack.ready(within_s=120)
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with Browser(tmp_path_factory.mktemp("browser") / "profile") as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def page(stack: Stack, browser: Browser) -> AsyncIterator[Page]:
    """The page of the first gateway, with nothing wrong in it at the end."""
    page = await browser.open(f"{stack.url()}/")
    await page.resize(1600, 1000)
    await page.until(LIVE)
    yield page
    assert page.errors == []
    elsewhere = [url for url in page.requested if not url.startswith(stack.url()) and url != "about:blank"]
    assert elsewhere == [], "nothing is loaded from elsewhere"
    await page.close()


async def ask(page: Page, text: str, *, max_tokens: int = 24) -> None:
    await page.evaluate(f"document.querySelector('#chat-max-tokens').value = {max_tokens}")
    await page.evaluate("document.querySelector('#chat-temperature').value = 0")
    await page.type("#chat-input", text)
    await page.press("Enter", 13)


async def worker_ids(page: Page) -> list[str]:
    return await page.evaluate("[...document.querySelectorAll('#workers tbody tr')].map(row => row.dataset.id)")


async def test_the_page_loads_without_an_error_and_lists_every_worker(stack: Stack, page: Page) -> None:
    await page.until("document.querySelectorAll('#workers tbody tr').length === 5")
    assert sorted(await worker_ids(page)) == sorted(name for name in stack.processes if not name.startswith("gateway"))
    assert await page.text("#models") == "smollm2-135m-instruct"
    assert "gateway-0" in await page.text("#gateway")
    assert "gateway-0 knows" in await page.text("#scope"), "it says that other gateways have their own"
    pools = await page.text("#pools")
    assert all(name in pools for name in ("Prefill", "Decode", "Draft", "KV store")) and "2 of 2 workers ready" in pools
    assert "Decode workers" in await page.text("#tiers") and "host memory" in await page.text("#tiers")
    await page.until("document.querySelector('#c-tokens path.l0').getAttribute('d')")


async def test_an_answer_streams_in_and_its_timeline_appears(page: Page) -> None:
    await page.evaluate(
        "window.lengths = new Set(); new MutationObserver(() => lengths.add(document.querySelector('.message.assistant .text')"
        "?.textContent.length)).observe(document.querySelector('#chat-log'), {subtree: true, childList: true})"
    )
    await ask(page, "What is the capital of France?", max_tokens=48)
    await page.until("document.querySelector('.message.assistant')?.getAttribute('aria-busy') === null && true", within_s=60)
    assert "Paris" in await page.text(".message.assistant")
    assert await page.evaluate("lengths.size") > 3, "it came in pieces"
    assert "first token" in await page.text("#chat-log .facts")
    await page.until("document.querySelector('#timeline .steps')?.innerText.includes('ended:')")
    steps = await page.text("#timeline .steps")
    assert "queued" in steps and "placed on" in steps and "first token" in steps and "decoding on decode-" in steps
    name = await page.text("#timeline h3")
    assert name.startswith("chatcmpl-") and len(name) < 20
    await page.until(f"document.querySelector('.request[data-name=\"{name}\"]')?.getAttribute('aria-pressed') === 'true'")
    await ask(page, "And of Italy?", max_tokens=32)
    await page.until("document.querySelectorAll('#chat-log .facts').length === 2", within_s=60)
    assert "Rome" in await page.text(".message.assistant:nth-of-type(4)") or "Rome" in await page.text("#chat-log")


async def test_an_answer_can_be_stopped(stack: Stack, page: Page) -> None:
    await ask(page, "Tell me a very long story about a mill.", max_tokens=1500)
    await page.until("document.querySelector('.message.assistant .text')?.textContent.length > 40", within_s=60)
    await page.click("#chat-stop")
    await page.until("document.querySelector('#chat-log .facts')?.innerText.includes('stopped')")
    await page.until("document.querySelector('#timeline .steps')?.innerText.includes('ended: cancelled')")
    await stack.clean(within_s=5)


async def test_tools_and_formats_are_sent_as_typed_and_errors_shown_as_they_come(page: Page) -> None:
    await page.evaluate("document.querySelector('.chat details').open = true")
    await page.type("#chat-tools", "[not json")
    await ask(page, "Hi")
    await page.until("document.querySelector('.failure')?.innerText.includes('tools is not JSON')")
    await page.type("#chat-tools", '[{"type": "nonsense"}]')
    await ask(page, "Hi")
    told = await page.until("[...document.querySelectorAll('.failure')][1]?.innerText")
    assert "tools" in told, told
    assert await page.evaluate("document.querySelector('#chat-input').value") == "Hi", "what was typed is not lost"
    page.errors[:] = [error for error in page.errors if "status of 400" not in error]  # the browser logs every 4xx


async def test_everything_can_be_reached_by_keyboard(page: Page) -> None:
    await ask(page, "Hello", max_tokens=4)
    await page.until("document.querySelectorAll('.request').length > 0 && !document.querySelector('.writing')", within_s=60)
    missing = {"skip", "theme", "request", "search", "chat-log", "chat-input", "chat-temperature", "chat-send"}
    for _ in range(120):
        await page.press("Tab", 9)
        missing.discard(await page.evaluate("(e => e.id || e.className || e.tagName)(document.activeElement)"))
        if not missing:
            break
    assert missing == set()
    outline = "getComputedStyle(document.querySelector('#search')).outlineStyle"
    await page.evaluate("document.querySelector('#search').focus()")
    assert await page.evaluate(outline) == "solid"


CONTRAST = """
(() => {
  const parse = (color) => (color.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const low = [];
  for (const node of document.querySelectorAll('h1, h2, dt, dd, p, b, th, td, span, small, summary, label, button, figcaption')) {
    if (!node.innerText?.trim() || !node.offsetParent) continue;
    let behind = node;
    while (behind && (parse(getComputedStyle(behind).backgroundColor)[3] ?? 1) < 1) behind = behind.parentElement;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(parse(getComputedStyle(behind ?? document.body).backgroundColor))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([node.tagName, node.className, node.innerText.slice(0, 30), ratio.toFixed(2)]);
  }
  return low;
})()
"""  # noqa: E501


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_light_and_dark_are_readable(page: Page, scheme: str) -> None:
    await page.prefer(prefers_color_scheme=scheme)
    await page.until(f"document.documentElement.classList.contains('light') === {json.dumps(scheme == 'light')}")
    assert await page.evaluate(CONTRAST) == []


@pytest.mark.parametrize("width", [360, 768, 1280, 3840])
async def test_it_fits_a_phone_and_a_wall(page: Page, width: int) -> None:
    await page.resize(width, 800)
    await anyio.sleep(0.3)
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    outside = await page.evaluate(
        "[...document.querySelectorAll('main > *, .card, #chat-input')].filter(e => e.offsetParent && "
        f"(e.getBoundingClientRect().right > {width} + 1 || e.getBoundingClientRect().left < 0)).map(e => e.className)"
    )
    assert outside == []


async def test_nothing_moves_for_those_who_asked_for_that(page: Page) -> None:
    await page.prefer(prefers_reduced_motion="reduce")
    await page.evaluate("document.querySelector('.water').classList.add('on')")
    assert await page.evaluate("document.getAnimations().filter(a => a.playState === 'running').length") == 0


async def test_the_page_stays_usable_with_a_thousand_workers(stack: Stack, page: Page) -> None:
    workers = [presence("kvstore", number, model="elsewhere", host="h") for number in range(1000, 2000)]

    async def live() -> None:
        while True:
            for one in workers:
                await stack.bus.publish(subjects.presence(one.worker.role, one.worker.id), messages.encode(one))
            await anyio.sleep(0.8)

    async with anyio.create_task_group() as group:
        group.start_soon(live)
        await page.until("document.querySelector('#pools').innerText.includes('1,000 workers')", within_s=60)
        await page.until("document.querySelectorAll('#workers tbody tr').length === 100")
        assert "search for others" in await page.text("#workers-note")
        await page.type("#search", "kvstore-1777")
        await page.until("document.querySelectorAll('#workers tbody tr').length === 1")
        assert await worker_ids(page) == ["kvstore-1777"]
        await page.evaluate(
            "window.longest = 0; new PerformanceObserver(list => list.getEntries().forEach(entry => "
            "longest = Math.max(longest, entry.duration))).observe({type: 'longtask'})"
        )
        await ask(page, "Hi", max_tokens=8)
        await page.until("document.querySelector('#chat-log .facts') !== null", within_s=60)
        assert await page.evaluate("longest") < 1000, "milliseconds that the page did not answer to anybody"
        group.cancel_scope.cancel()


async def test_with_an_api_key_the_page_asks_for_it(stack: Stack, browser: Browser) -> None:
    name = await stack.start("gateway", environment={"PENSTOCK_API_KEY": KEY}, name="gateway-key")
    await stack.ready(name)
    page = await browser.open(f"{stack.url(name)}/")
    await page.until("document.querySelector('#key').open")
    assert await worker_ids(page) == []
    await page.type("#key-input", "wrong")
    await page.press("Enter", 13)
    await page.until(
        "document.querySelector('#key').open && document.querySelector('#key-why').innerText.includes('not the key')"
    )
    await page.type("#key-input", KEY)
    await page.press("Enter", 13)
    await page.until(LIVE)
    await page.until("document.querySelectorAll('#workers tbody tr').length > 0")
    await ask(page, "What is the capital of France?")
    await page.until("document.querySelector('.message.assistant')?.innerText.includes('Paris')", within_s=60)
    assert KEY not in await page.evaluate("location.href + document.documentElement.outerHTML")
    assert not [url for url in page.requested if KEY in url]
    assert [error for error in page.errors if "status of 401" not in error] == []
    await page.close()


TENANTS = """
[tenants.acme]

[tenants.ops]
dashboard = true
"""


async def test_with_a_tenants_key_the_playground_works_and_the_page_says_why_the_rest_does_not(
    stack: Stack, browser: Browser
) -> None:
    keys = stack.directory / "keys.toml"
    lines = [
        f'[[keys]]\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\ntenant = "{name}"\n' for name in ("acme", "ops")
    ]
    keys.write_text(TENANTS + "\n".join(lines))
    name = await stack.start("gateway", "--api-keys", str(keys), name="gateway-tenants")
    await stack.ready(name)
    page = await browser.open(f"{stack.url(name)}/")
    await page.until("document.querySelector('#key').open")
    await page.type("#key-input", "acme")
    await page.press("Enter", 13)
    await page.until("document.querySelector('#live').textContent === 'playground only'")
    assert "acme may not see this: it shows everyone's requests. The playground works with this key." in await page.text("main")
    assert not await page.evaluate("document.querySelector('#workers').offsetParent"), "no empty charts and tables"
    await page.until("document.querySelector('#chat-model').value === 'smollm2-135m-instruct'")
    await ask(page, "What is the capital of France?")
    await page.until("document.querySelector('.message.assistant')?.innerText.includes('Paris')", within_s=60)
    await page.click("#other-key")
    await page.until("document.querySelector('#key').open")
    await page.type("#key-input", "ops")
    await page.press("Enter", 13)
    await page.until(LIVE)
    await page.until("document.querySelectorAll('#workers tbody tr').length > 0")
    assert await page.evaluate("document.querySelector('#workers').offsetParent && document.querySelector('#forbidden').hidden")
    assert [error for error in page.errors if "status of 40" not in error] == []
    await page.close()


async def test_a_schema_is_obeyed_in_the_playground(page: Page) -> None:
    size = {"type": "string", "enum": ["small", "large"]}
    schema = {"type": "object", "properties": {"size": size}, "required": ["size"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    await page.evaluate("document.querySelector('.chat details').open = true")
    await page.type("#chat-format", json.dumps(form))
    await ask(page, "How large is Paris?", max_tokens=60)
    await page.until("document.querySelectorAll('#chat-log .facts').length === 1", within_s=60)
    assert json.loads(await page.text(".message.assistant .text"))["size"] in size["enum"]


async def test_a_killed_worker_shows_up_and_its_request_goes_on(stack: Stack, page: Page) -> None:
    await ask(page, "Tell me a long story about a mill.", max_tokens=400)
    await page.until("document.querySelector('#timeline .steps')?.innerText.includes('decoding on decode-')", within_s=60)
    steps = await page.text("#timeline .steps")
    holder = steps.split("decoding on ")[1].split()[0]
    stack.kill(holder)
    await page.until(f"![...document.querySelectorAll('#workers tbody tr')].some(row => row.dataset.id === '{holder}')")
    await page.until("document.querySelector('#timeline .steps').innerText.includes('queued again after worker_lost')")
    await page.until("document.querySelector('#timeline .steps').innerText.includes('ended:')", within_s=90)
    other = next(name for name in stack.processes if name.startswith("decode"))
    assert f"decoding on {other}" in await page.text("#timeline .steps")
    await page.until("document.querySelector('#f-resumes').innerText.includes('1 went on elsewhere')")
    assert await page.evaluate("document.querySelectorAll('.failure').length") == 0


async def test_the_page_of_the_api_lists_every_route_and_shows_an_arguments_bounds(stack: Stack, browser: Browser) -> None:
    docs = await browser.open(f"{stack.url()}/docs")
    try:
        await docs.until("document.querySelectorAll('#operations details').length > 10")
        listed = await docs.evaluate("[...document.querySelectorAll('#operations summary code')].map(code => code.textContent)")
        described = (await stack.client.get(f"{stack.url()}/openapi.json")).json()["paths"]
        assert set(listed) == set(described)
        await docs.type("#filter", "top_logprobs")
        await docs.until(
            "document.querySelectorAll('#operations details').length === 3"
        )  # chat, responses, and the count of their tokens
        await docs.click("#operations summary")
        await docs.until("document.querySelector('#operations table') !== null")
        assert "0 to 20" in await docs.text("#operations"), "the bounds of top_logprobs"
        await docs.evaluate("document.querySelector('#filter').value = ''")
        await docs.evaluate("document.querySelector('#filter').dispatchEvent(new Event('input'))")
        await docs.evaluate("document.querySelectorAll('#operations details').forEach(each => { each.open = true; })")
        await docs.until("[...document.querySelectorAll('#operations details')].every(each => each.childElementCount > 1)")
        assert "purpose" in await docs.text("#operations"), "a field of the form that files are uploaded with"
        assert await docs.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing stands beside the page"
        assert not docs.errors
    finally:
        await docs.close()
