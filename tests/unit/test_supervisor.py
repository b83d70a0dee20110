"""Children are restarted when they crash, told about when they can't work, and all gone when the block ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from common.cli.console import first_error
from common.cli.supervisor import ChildFailed, Command, Supervisor

SLEEPER = "import signal; signal.sigwait([signal.SIGTERM])"


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


async def until(condition: Callable[[], object], seconds: float = 10) -> None:
    ended = time.monotonic() + seconds
    while not condition() and time.monotonic() < ended:
        await anyio.sleep(0.02)
    assert condition()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_killed_child_is_started_again_and_reported(tmp_path: Path) -> None:
    reports: list[str] = []
    supervisor = Supervisor([Command(name="worker", argv=python(SLEEPER))], log_dir=tmp_path, report=reports.append)
    child = supervisor.children[0]
    async with supervisor.running():
        first = child.pid
        assert first is not None
        child.signal(signal.SIGKILL)
        await until(lambda: child.pid not in (None, first))
        second = child.pid
    assert "worker was killed by signal 9" in reports[0]
    assert second is not None and gone(first) and gone(second)


async def test_a_child_that_never_works_ends_the_whole_with_its_last_log_lines(tmp_path: Path) -> None:
    broken = Command(name="broken", argv=python("import sys; sys.exit('error: no such model')"))
    healthy = Command(name="healthy", argv=python(SLEEPER))
    supervisor = Supervisor([broken, healthy], log_dir=tmp_path, report=lambda line: None)
    with pytest.raises(BaseExceptionGroup) as raised:
        async with supervisor.running():
            await anyio.sleep(30)
    error = first_error(raised.value)
    assert isinstance(error, ChildFailed)
    assert "broken ended with status 1, attempt 3" in str(error)
    assert "error: no such model" in str(error)
    pid = supervisor.children[1].pid
    assert pid is not None and gone(pid)


async def test_wrong_settings_are_not_tried_twice(tmp_path: Path) -> None:
    wrong = Command(name="wrong", argv=python("import sys; print('unknown flag --modle'); sys.exit(2)"))
    supervisor = Supervisor([wrong], log_dir=tmp_path, report=lambda line: None)
    with pytest.raises(BaseExceptionGroup) as raised:
        async with supervisor.running():
            await anyio.sleep(30)
    assert "attempt 1" in str(first_error(raised.value))
    assert supervisor.children[0].crashes == 1


async def test_a_child_that_crashes_after_all_was_ready_is_restarted_for_ever(tmp_path: Path) -> None:
    reports: list[str] = []
    crashing = Command(name="crashing", argv=python("import sys; sys.exit(3)"))
    supervisor = Supervisor([crashing], log_dir=tmp_path, report=reports.append)
    supervisor.started_once = True
    async with supervisor.running():
        await until(lambda: supervisor.children[0].crashes >= 3)
    assert any("keeps crashing" in report for report in reports)


async def test_stages_are_stopped_one_after_another(tmp_path: Path) -> None:
    stamp = (
        "import pathlib, signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('up', flush=True);"
        "signal.sigwait([signal.SIGTERM]); time.sleep({s}); pathlib.Path({p!r}).touch()"
    )
    early, late = tmp_path / "early", tmp_path / "late"
    commands = [
        Command(name="late", argv=python(stamp.format(s=0.05, p=str(late))), stage=1),
        Command(name="early", argv=python(stamp.format(s=0.3, p=str(early))), stage=0),
    ]
    supervisor = Supervisor(commands, log_dir=tmp_path, report=lambda line: None)
    async with supervisor.running():
        await until(lambda: all("up" in child.tail() for child in supervisor.children))
    assert early.stat().st_mtime_ns < late.stat().st_mtime_ns


async def test_a_child_that_ignores_sigterm_is_killed_after_the_drain_timeout(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    reports: list[str] = []
    supervisor = Supervisor(
        [Command(name="stubborn", argv=python(stubborn))], log_dir=tmp_path, report=reports.append, drain_timeout_s=0.3
    )
    child = supervisor.children[0]
    started = time.monotonic()
    async with supervisor.running():
        await until(lambda: "up" in child.tail())
    assert time.monotonic() - started < 10
    assert child.pid is not None and gone(child.pid)
    assert "stubborn did not end" in reports[0]


async def test_children_know_their_supervisor_and_have_a_session_of_their_own(tmp_path: Path) -> None:
    program = f"import os; print(os.environ['PENSTOCK_PARENT_PID'], os.getsid(0) == os.getpid(), flush=True); {SLEEPER}"
    supervisor = Supervisor([Command(name="child", argv=python(program))], log_dir=tmp_path, report=lambda line: None)
    async with supervisor.running():
        await until(lambda: supervisor.children[0].tail())
    assert supervisor.children[0].tail() == f"{os.getpid()} True"
