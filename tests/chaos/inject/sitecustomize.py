"""First on PYTHONPATH, it breaks the service that Python is about to run, from outside: no file of the service knows of it.

CHAOS="hang=2 once=/tmp/marker clock=-3600" are faults by name:

    hang=ID     the step that computes a prompt token ID never returns       each of these may be
    raise=ID    it raises                                                     ID "any": every step
    crash=ID    it ends the process, as a segmentation fault in a kernel would
    when=FILE   only while FILE exists
    once=FILE   only the first process that comes that far, of all with the same FILE, and only once
    clock=S     the wall clock is S seconds ahead
    nixl_fail=N    every Nth operation of NIXL fails
    nixl_damage=N  every Nth operation of NIXL brings a wrong byte
    fetch=always   what a kvstore has is fetched, however slow that was measured to be
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

ENGINES = ("services.prefill", "services.decode")


def _first(marker: str) -> bool:
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _break(runner: Any, faults: dict[str, str]) -> None:
    execute = runner.execute

    def now() -> bool:
        return ("when" not in faults or Path(faults["when"]).exists()) and ("once" not in faults or _first(faults["once"]))

    def broken(plan: Any) -> Any:
        tokens = {str(token) for row in plan.rows for token in row.tokens} | {"any"}
        for kind in ("hang", "raise", "crash"):
            if faults.get(kind) in tokens and now():
                sys.stderr.write(f"chaos: {kind}\n")
                if kind == "hang":
                    threading.Event().wait()
                if kind == "crash":
                    os._exit(139)
                raise RuntimeError("chaos")
        return execute(plan)

    runner.execute = broken


def _break_nixl(fail_every: int, damage_every: int) -> None:
    from common.transfer import nixl_agent

    class BrokenAgent(nixl_agent.NixlAgent):
        num_reads = 0

        def begin_read(self, peer: str, local: Any, remote: Any) -> int:
            BrokenAgent.num_reads += 1
            operation = super().begin_read(peer, local, remote)
            if fail_every and BrokenAgent.num_reads % fail_every == 0:
                self.failing.add(operation)
            if damage_every and BrokenAgent.num_reads % damage_every == 0:
                self.damaged[operation] = int(local[0, 0])
            return operation

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.failing: set[int] = set()
            self.damaged: dict[int, int] = {}

        def is_done(self, operation: int) -> bool:
            if not super().is_done(operation):
                return False
            if operation in self.failing:
                self.failing.remove(operation)
                raise nixl_agent.TransportUnavailable("chaos")
            if (address := self.damaged.pop(operation, 0)) != 0:
                ctypes.c_ubyte.from_address(address).value ^= 0x10
            return True

    nixl_agent.NixlAgent = BrokenAgent


def _fetch_always() -> None:
    from common.worker.fetch_rate import FetchRates

    FetchRates.pays = lambda *_, **__: True


def _inject(faults: dict[str, str]) -> None:
    if "clock" in faults:
        ahead_s, seconds, nanoseconds = float(faults["clock"]), time.time, time.time_ns
        time.time = lambda: seconds() + ahead_s
        time.time_ns = lambda: nanoseconds() + int(ahead_s * 1e9)
    if "nixl_fail" in faults or "nixl_damage" in faults:
        _break_nixl(int(faults.get("nixl_fail", 0)), int(faults.get("nixl_damage", 0)))
    if "fetch" in faults:
        _fetch_always()
    if any(service in sys.orig_argv for service in ENGINES):
        from common.engine.load import open as opening

        opened = opening.open_engine

        def open_broken(*arguments: Any, **named: Any) -> Any:
            engine = opened(*arguments, **named)
            _break(engine.runner, faults)
            return engine

        opening.open_engine = open_broken


if "CHAOS" in os.environ:
    _inject(dict(word.split("=", 1) for word in os.environ["CHAOS"].split()))
