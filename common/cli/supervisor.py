"""Keeps child processes running: starts them, restarts those that crash, and ends them in order.

A child's life:  start ─► running ─► exit ─► back-off ─► start …
                             └► stop: SIGTERM once, time to drain, SIGKILL

Children get a session of their own, so that Ctrl-C in a terminal reaches the supervisor alone, which asks each child once.
`PENSTOCK_PARENT_PID` lets a child notice that its supervisor was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from common.protocol.errors import PenstockError

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 10.0
STABLE_S = 30.0
"""A child that lived so long starts again with the shortest back-off."""
STARTUP_CRASHES = 3
"""So many crashes in a row, before the whole was ready once, end the supervisor: waiting would not help."""
HOPELESS_STATUS = 2
"""What a service ends with when its settings or its model are wrong: starting it again can't help."""
TAIL_LINES = 12


class ChildFailed(PenstockError):
    """A child keeps crashing before everything was ready; the message holds its last log lines."""

    code = "child_failed"


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A process to keep running. Lower `stage`s are stopped first; the next stage waits until they are gone.

    `environment` goes over the supervisor's own: passwords belong there, since everyone can read a command line.
    """

    name: str
    argv: list[str]
    environment: dict[str, str] = {}
    stage: int = 0


class Child:
    """One supervised process and its log file."""

    def __init__(self, command: Command, log: Path) -> None:
        self.command = command
        self.log = log
        self.process: anyio.abc.Process | None = None
        self.crashes = 0
        self.crashes_in_a_row = 0

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the child is gone."""
        if self.process is not None and self.process.returncode is None:
            try:
                self.process.send_signal(number)
            except ProcessLookupError:
                return

    def tail(self) -> str:
        """The last lines of its log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-TAIL_LINES:])


class Supervisor:
    """`async with supervisor.running():` — inside, every command runs; after it, none does."""

    def __init__(
        self,
        commands: Sequence[Command],
        *,
        log_dir: Path,
        report: Callable[[str], None],
        drain_timeout_s: float = 35.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.children = [Child(command, log_dir / f"{command.name}.log") for command in commands]
        self.started_once = False
        """Set by the owner once everything was ready: from then on a crashing child is restarted for ever."""
        self._report = report
        self._drain_timeout_s = drain_timeout_s
        self._environment = {**os.environ, **(environment or {}), "PENSTOCK_PARENT_PID": str(os.getpid())}
        self._stopping: anyio.Event | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """:raises ChildFailed: (in a group) if a child crashes STARTUP_CRASHES times before `started_once`."""
        self._stopping = stopping = anyio.Event()
        async with anyio.create_task_group() as keepers:
            for child in self.children:
                await keepers.start(self._keep, child, stopping)
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stop(stopping)
                keepers.cancel_scope.cancel()

    def kill(self) -> None:
        """End every child now, without draining."""
        for child in self.children:
            child.signal(signal.SIGKILL)

    @property
    def crashed(self) -> bool:
        return any(child.crashes for child in self.children)

    async def _keep(
        self, child: Child, stopping: anyio.Event, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        process = await self._start(child)
        task_status.started()
        while True:
            started = time.monotonic()
            status = await process.wait()
            if stopping.is_set():
                return
            await self._crashed(child, status, time.monotonic() - started, stopping)
            if stopping.is_set():
                return
            process = await self._start(child)

    async def _start(self, child: Child) -> anyio.abc.Process:
        with child.log.open("ab") as log:
            child.process = await anyio.open_process(
                child.command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._environment, **child.command.environment},
                start_new_session=True,
            )
        return child.process

    async def _crashed(self, child: Child, status: int, lived_s: float, stopping: anyio.Event) -> None:
        """Tell, then wait out the back-off.

        :raises ChildFailed: if it crashes again and again and never worked.
        """
        name = child.command.name
        child.crashes += 1
        child.crashes_in_a_row = 1 if lived_s > STABLE_S else child.crashes_in_a_row + 1
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        hopeless = status == HOPELESS_STATUS or child.crashes_in_a_row >= STARTUP_CRASHES
        if hopeless and not self.started_once:
            raise ChildFailed(f"{name} {ended}, attempt {child.crashes_in_a_row}. Its log ends with:\n{child.tail()}")
        backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (child.crashes_in_a_row - 1))
        self._report(f"{name} {ended} after {lived_s:.0f} s; starting it again in {backoff_s:.1f} s (log: {child.log})")
        if child.crashes_in_a_row >= STARTUP_CRASHES:
            self._report(f"{name} keeps crashing. Its log ends with:\n{child.tail()}")
        with anyio.move_on_after(backoff_s):
            await stopping.wait()

    async def _stop(self, stopping: anyio.Event) -> None:
        stopping.set()
        for stage in sorted({child.command.stage for child in self.children}):
            members = [child for child in self.children if child.command.stage == stage and child.process is not None]
            for child in members:
                child.signal(signal.SIGTERM)
            with anyio.move_on_after(self._drain_timeout_s):
                for child in members:
                    await _gone(child)
            for child in members:
                if child.process is not None and child.process.returncode is None:
                    self._report(f"{child.command.name} did not end within {self._drain_timeout_s:.0f} s: killing it")
                    child.signal(signal.SIGKILL)
                    await _gone(child)


async def _gone(child: Child) -> None:
    if child.process is not None:
        await child.process.wait()


def python_module(module: str, arguments: Sequence[str]) -> list[str]:
    """The command line of `python -m module`, with this interpreter."""
    return [sys.executable, "-m", module, *arguments]
