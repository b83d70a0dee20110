"""Keeps child processes running: starts them, restarts those that crash, and ends them in order.

A child's life:  start ─► running ─► exit ─► back-off ─► start …
                             └► stop: SIGTERM once, time to drain, SIGKILL

A first crash is answered at once. Crashes are remembered for minutes, so that a process that crashes again and again is started
less and less often (`backoff.py`), however long it runs in between.

Stopping takes `drain_timeout_s` at the most, for all stages together: each later stage has a reserve of its own, and a child
that is still there when its stage's time is over is killed.

Children get a session of their own, so that Ctrl-C in a terminal reaches the supervisor alone, which asks each child once.
`PENSTOCK_PARENT_PID` lets a child notice that its supervisor was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from common.cli.backoff import Backoff
from common.protocol.errors import PenstockError

STARTUP_CRASHES = 3
"""So many crashes before the whole was ready once end the supervisor: waiting would not help."""
HOPELESS_STATUS = 2
"""What a service ends with when its settings, its model or the machine are not as it needs them. Before everything was ready
once, starting it again can't help; afterwards what is missing, a network interface say, may come back."""
MIN_DRAIN_S = 1.0
MAX_STAGE_RESERVE_S = 2.0
"""Kept of the drain's time for each later stage."""
KILLED_WITHIN_S = 1.0
"""A killed process that is still there then is stuck in the kernel, and left to it."""
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
        self.backoff = Backoff()

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
        drain_timeout_s: float = 30.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.children = [Child(command, log_dir / f"{command.name}.log") for command in commands]
        self.started_once = False
        """Set by the owner once everything was ready: from then on a crashing child is restarted for ever."""
        self._report = report
        self._drain_timeout_s = max(MIN_DRAIN_S, drain_timeout_s)
        self._environment = {**os.environ, **(environment or {}), "PENSTOCK_PARENT_PID": str(os.getpid())}
        self._stopping: anyio.Event | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """:raises ChildFailed: (in a group) if a child crashes STARTUP_CRASHES times before `started_once`."""
        self._stopping = stopping = anyio.Event()
        async with anyio.create_task_group() as keepers:
            try:
                for child in self.children:
                    await keepers.start(self._keep, child, stopping)
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
            if stopping.is_set():  # too late to be asked
                child.signal(signal.SIGKILL)
                return

    async def _start(self, child: Child) -> anyio.abc.Process:
        with child.log.open("ab") as log:
            with anyio.CancelScope(shield=True):  # a process that was started is known
                child.process = await anyio.open_process(
                    child.command.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**self._environment, **child.command.environment},
                    start_new_session=True,
                )
        assert child.process is not None
        return child.process

    async def _crashed(self, child: Child, status: int, lived_s: float, stopping: anyio.Event) -> None:
        """Tell, then wait out the back-off.

        :raises ChildFailed: if it crashes again and again and never worked.
        """
        name = child.command.name
        child.crashes += 1
        backoff_s = child.backoff.crashed(time.monotonic())
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        hopeless = status == HOPELESS_STATUS or child.backoff.num_recent >= STARTUP_CRASHES
        if hopeless and not self.started_once:
            raise ChildFailed(f"{name} {ended}, attempt {child.crashes}. Its log ends with:\n{child.tail()}")
        when = f"in {backoff_s:.1f} s" if backoff_s else "at once"
        self._report(f"{name} {ended} after {lived_s:.0f} s; starting it again {when} (log: {child.log})")
        if child.backoff.num_recent >= STARTUP_CRASHES:
            self._report(f"{name} keeps crashing. Its log ends with:\n{child.tail()}")
        with anyio.move_on_after(backoff_s):
            await stopping.wait()

    async def _stop(self, stopping: anyio.Event) -> None:
        stopping.set()
        stages = sorted({child.command.stage for child in self.children})
        ends_at = anyio.current_time() + self._drain_timeout_s
        for number_after, stage in zip(reversed(range(len(stages))), stages, strict=True):
            members = [child for child in self.children if child.command.stage == stage and child.process is not None]
            for child in members:
                child.signal(signal.SIGTERM)
            stage_ends_at = ends_at - number_after * stage_reserve_s(self._drain_timeout_s)
            with anyio.CancelScope(deadline=stage_ends_at):
                for child in members:
                    await _gone(child)
            late = [child for child in members if child.process is not None and child.process.returncode is None]
            for child in late:
                self._report(f"{child.command.name} did not end in time: killing it")
                child.signal(signal.SIGKILL)
            with anyio.move_on_after(KILLED_WITHIN_S):
                for child in late:
                    await _gone(child)


def stage_reserve_s(drain_timeout_s: float) -> float:
    """Seconds of `drain_timeout_s` that each stage leaves to every later one.

    >>> stage_reserve_s(30.0), stage_reserve_s(4.0)
    (2.0, 1.0)
    """
    return min(MAX_STAGE_RESERVE_S, drain_timeout_s / 4)


async def _gone(child: Child) -> None:
    if child.process is not None:
        await child.process.wait()
