"""A real browser for a test: chromium without a window, driven over a pair of pipes (Chrome DevTools Protocol).

async with Browser(directory) as browser:
    page = await browser.open("http://127.0.0.1:8000/")
    await page.until("document.title === 'Penstock'")
    assert not page.errors
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
needs_chromium = pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="no chromium here: apt-get install chromium")
COMMAND_TIMEOUT_S = 30.0


class Page:
    """A tab. `errors`: uncaught exceptions, failed loads, and what was logged as an error or broke the page's own rules."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._browser = browser
        self._session = session

    async def command(self, method: str, **parameters: Any) -> Any:
        return await self._browser.command(method, parameters, session=self._session)

    async def evaluate(self, expression: str) -> Any:
        """:raises AssertionError: the expression threw."""
        answer = await self.command("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, *, within_s: float = 15) -> Any:
        """Wait until an expression is truthy, and return its value."""
        value = None
        try:
            with anyio.fail_after(within_s):
                while not (value := await self.evaluate(expression)):
                    await anyio.sleep(0.05)
        except TimeoutError:
            shown = await self.evaluate("document.body.innerText.slice(0, 3000)")
            raise AssertionError(f"{expression} did not come true; the page shows:\n{shown}\nerrors: {self.errors}") from None
        return value

    async def text(self, selector: str) -> str:
        return await self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    async def type(self, selector: str, text: str) -> None:
        """Focus an element and type over what is in it."""
        await self.evaluate(f"(e => {{ e.focus(); e.select?.(); }})(document.querySelector({json.dumps(selector)}))")
        await self.command("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.command("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else "", **named)
        await self.command("Input.dispatchKeyEvent", type="keyUp", **named)

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    async def prefer(self, **features: str) -> None:
        """Media features, for example `prefers_color_scheme="dark"`."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.command("Emulation.setEmulatedMedia", features=wanted)

    async def screenshot(self, path: Path, *, whole: bool = False) -> None:
        answer = await self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def close(self) -> None:
        await self.command("Page.close")

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters["exceptionDetails"])[:1000])
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(parameters["args"])[:1000])
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                entry = parameters["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])
            case _:
                pass


class Browser:
    """`directory` is for the browser's profile."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._pages: dict[str, Page] = {}
        self._pending = b""

    async def __aenter__(self) -> Browser:
        program = next(found for name in NAMES if (found := shutil.which(name)))
        to_browser, self._write_end = os.pipe()
        self._read_end, from_browser = os.pipe()
        command = [program, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self._directory}"]
        command += ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"]
        command += ["--disable-background-networking", "--disable-component-update", "about:blank"]
        shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        with (self._directory.parent / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", shell, "browser", *command],
                pass_fds=(to_browser, from_browser),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self._read_end, False)
        asyncio.get_running_loop().add_reader(self._read_end, self._read)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        os.close(self._write_end)  # it ends by itself then
        with anyio.move_on_after(5, shield=True):
            while self._process.poll() is None:
                await anyio.sleep(0.02)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def open(self, url: str) -> Page:
        target = await self.command("Target.createTarget", {"url": "about:blank"})
        attached = await self.command("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.command(f"{domain}.enable")
        await page.command("Page.navigate", url=url)
        await page.until("document.readyState === 'complete'")
        return page

    async def command(self, method: str, parameters: dict[str, Any], *, session: str = "") -> Any:
        """:raises AssertionError: the browser refuses it."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        os.write(self._write_end, json.dumps(message).encode() + b"\0")
        with anyio.fail_after(COMMAND_TIMEOUT_S):
            return await answer

    def _read(self) -> None:
        try:
            data = os.read(self._read_end, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._read_end)
            return
        *messages, self._pending = (self._pending + data).split(b"\0")
        for text in messages:
            message = json.loads(text)
            answer = self._answers.pop(message.get("id", 0), None)
            if answer is None:
                page = self._pages.get(message.get("sessionId", ""))
                if page is not None and "method" in message:
                    page.note(message["method"], message["params"])
            elif "error" in message:
                answer.set_exception(AssertionError(f"{message['error']}"))
            else:
                answer.set_result(message["result"])
