"""A program at a real terminal (a pty), as somebody sits before it: keys in, what the screen shows out."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType

import anyio

from tests.e2e.stack import ROOT

CTRL_C, CTRL_D = "\x03", "\x04"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")


class Terminal:
    """async with Terminal(command) as terminal: await terminal.shows("> "); terminal.type("hello\\n")"""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", **(environment or {})}
        self._seen_to = 0
        self.screen = ""
        """Everything written so far, without colours and cursor moves."""

    async def __aenter__(self) -> Terminal:
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        # a session of its own with this terminal as the controlling one: so Ctrl-C is a signal
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *self._command],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=self._environment,
            process_group=0,
        )
        os.close(slave)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._master)  # a hangup: the session ends
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(10)
        if kind is not None:
            print(self.screen)  # noqa: T201

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    async def shows(self, text: str, within_s: float = 30) -> str:
        """Wait until `text` is on the screen, behind what was waited for before. Returns what came before it."""
        with anyio.fail_after(within_s):
            while (at := self.screen.find(text, self._seen_to)) < 0:
                self._read()
                await anyio.sleep(0.02)
        before = self.screen[self._seen_to : at]
        self._seen_to = at + len(text)
        return before

    async def ended(self, within_s: float = 20) -> int:
        """Wait for the program to end; its exit status."""
        with anyio.fail_after(within_s):
            while self.process.poll() is None:
                self._read()
                await anyio.sleep(0.02)
        self._read()
        return self.process.returncode

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self.screen += _ESCAPES.sub("", data.decode(errors="replace")).replace("\r", "")
        except (BlockingIOError, OSError):  # nothing there; nobody has the other end open any more
            return
