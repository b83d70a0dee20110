"""Runs a process that prints a result per line, for at most so long, and ends all that it started.

Such processes start processes of their own: each has a session, and a guard that ends it with its parent (`guard` of
`common.runtime.parent_death`, called by our modules), so that nothing keeps a GPU that nobody waits for.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.common.machine import ROOT
from common.runtime import parent_death

_GRACE_S = 10.0


def run_child(
    command: Sequence[str],
    take: Callable[[bytes], None],
    *,
    environment: Mapping[str, str] | None = None,
    limit_s: float = 0.0,
    stderr: int | None = None,
) -> str:
    """Calls `take` with each line of stdout; stderr is ours, or as for `subprocess`. `limit_s` 0: no limit.

    Returns what went wrong, if anything.
    """
    late = threading.Event()
    # a session of its own: engines start processes that have to end with it
    environment = {**(os.environ if environment is None else environment), parent_death.PARENT_VARIABLE: str(os.getpid())}
    settings: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": stderr}
    with subprocess.Popen(command, start_new_session=True, **settings) as process:

        def end() -> None:
            late.set()
            _signal(process.pid, signal.SIGTERM)
            timer = threading.Timer(_GRACE_S, _signal, (process.pid, signal.SIGKILL))
            timer.daemon = True
            timer.start()

        timer = threading.Timer(limit_s, end) if limit_s else None
        if timer:
            timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                take(line)
            status = process.wait()
        finally:
            if timer:
                timer.cancel()
            _signal(process.pid, signal.SIGKILL)
    if late.is_set():
        return f"ended after its {limit_s:.0f} s"
    return f"ended with status {status}" if status else ""


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return
