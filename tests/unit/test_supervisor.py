"""Children are restarted when they crash, told about when they can't work, and all gone when the block ends."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import psutil
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


async def test_a_child_whose_network_interface_went_away_is_started_again_until_it_is_back(tmp_path: Path) -> None:
    """A service ends with status 2 where it can't use its --nixl-interface. It worked before, so its settings are not wrong."""
    interface, works, reports = tmp_path / "eth1", tmp_path / "works", list[str]()
    code = f"""
import pathlib, signal, sys
if not pathlib.Path({str(interface)!r}).exists():
    print("NIXL can't use UCX with nixl_interface eth1")
    sys.exit(2)
pathlib.Path({str(works)!r}).touch()
{SLEEPER}
"""
    supervisor = Supervisor([Command(name="decode-0", argv=python(code))], log_dir=tmp_path, report=reports.append)
    supervisor.started_once = True
    async with supervisor.running():
        await until(lambda: any("keeps crashing" in report for report in reports))
        interface.touch()
        await until(works.exists)
    assert "decode-0 ended with status 2" in reports[0] and "starting it again" in reports[0]
    assert any("nixl_interface eth1" in report for report in reports)


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


def starts(path: Path) -> list[float]:
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_a_child_that_crashes_again_and_again_is_started_less_and_less_often(tmp_path: Path) -> None:
    log = tmp_path / "starts"
    program = f"import time; open({str(log)!r}, 'a').write(f'{{time.monotonic()}}\\n'); time.sleep(0.1); raise SystemExit(3)"
    reports: list[str] = []
    supervisor = Supervisor([Command(name="worker", argv=python(program))], log_dir=tmp_path, report=reports.append)
    supervisor.started_once = True
    async with supervisor.running():
        await until(lambda: len(starts(log)) == 5, 20)
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts(log))]
    assert all(gap >= delay for gap, delay in zip(gaps, (0.0, 0.5, 1.0, 2.0), strict=True)), gaps
    delays = [report.partition("starting it again ")[2].partition(" (")[0] for report in reports if "starting" in report]
    assert delays[:4] == ["at once", "in 0.5 s", "in 1.0 s", "in 2.0 s"]


async def test_a_child_that_ran_well_comes_back_at_once_beside_one_that_crashes(tmp_path: Path) -> None:
    commands = [
        Command(name="crashing", argv=python("raise SystemExit(3)")),
        Command(name="worker", argv=python(f"print('up', flush=True); {SLEEPER}")),
    ]
    supervisor = Supervisor(commands, log_dir=tmp_path, report=lambda line: None)
    supervisor.started_once = True
    crashing, worker = supervisor.children
    async with supervisor.running():
        await until(lambda: crashing.crashes >= 3 and "up" in worker.tail())
        killed, first = time.monotonic(), worker.pid
        worker.signal(signal.SIGKILL)
        await until(lambda: worker.pid not in (None, first))
        assert time.monotonic() - killed < 0.5


async def test_stopping_takes_no_longer_than_the_drain_timeout_if_children_of_every_stage_hang(tmp_path: Path) -> None:
    commands = [
        Command(name=f"stage-{stage}", argv=python(f"print('up', flush=True); {SLEEPER}"), stage=stage) for stage in range(3)
    ]
    reports: list[str] = []
    supervisor = Supervisor(commands, log_dir=tmp_path, report=reports.append, drain_timeout_s=2.0)
    async with supervisor.running():
        await until(lambda: all("up" in child.tail() for child in supervisor.children))
        for child in supervisor.children:
            child.signal(signal.SIGSTOP)
        await until(lambda: all(psutil.Process(child.pid).status() == psutil.STATUS_STOPPED for child in supervisor.children))
        began = time.monotonic()
    assert 1.0 < time.monotonic() - began < 5.0, "6 s, were it one stage after the other"
    assert [report.split()[0] for report in reports] == ["stage-0", "stage-1", "stage-2"]
    assert all(child.pid is not None and gone(child.pid) for child in supervisor.children)


async def test_cancelling_while_children_are_started_leaves_none(tmp_path: Path) -> None:
    commands = [Command(name=f"child-{number}", argv=python(SLEEPER)) for number in range(8)]
    supervisor = Supervisor(commands, log_dir=tmp_path, report=lambda line: None, drain_timeout_s=2.0)

    async def cancel_early() -> None:
        await until(lambda: supervisor.children[2].pid is not None)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(cancel_early)
        async with supervisor.running():
            await anyio.sleep(30)
    pids = [child.pid for child in supervisor.children if child.pid is not None]
    assert len(pids) >= 3 and all(gone(pid) for pid in pids)
