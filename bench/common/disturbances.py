"""Workers that are killed, and started again by `penstock up`, or stopped for a while, at random."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

KILLED = 0.3
"""Of disturbances; the others stop a worker for up to a second."""
_NEEDED = "decode"
"""The last worker of this role is spared: without one, requests wait, and are refused in the end."""
_ROLE = re.compile(rb"services\.(\w+)")


class Disturbances:
    """Of the workers of some roles in one system, on the bus at `nats_port`. `count`: how many there were, `kinds`: by kind and
    role."""

    def __init__(self, nats_port: int, roles: Sequence[str] = ("draft",)) -> None:
        self.kinds = Counter[str]()
        self._mark = f":{nats_port}".encode()
        self._roles = roles
        self._random = random.Random(3)
        self._over = threading.Event()

    @property
    def count(self) -> int:
        return self.kinds.total()

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        thread = threading.Thread(target=self._work)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _work(self) -> None:
        while not self._over.wait(self._random.uniform(0.2, 1.5)):
            for pid, role in self._workers()[:1]:
                with contextlib.suppress(ProcessLookupError):
                    if self._random.random() < KILLED:
                        os.kill(pid, signal.SIGKILL)
                        self.kinds[f"{role} killed"] += 1
                    else:
                        os.kill(pid, signal.SIGSTOP)
                        self._over.wait(self._random.uniform(0.05, 1.0))
                        os.kill(pid, signal.SIGCONT)
                        self.kinds[f"{role} stopped"] += 1

    def _workers(self) -> list[tuple[int, str]]:
        """Of this system those that may be disturbed, in any order: process and role."""
        found: list[tuple[int, str]] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes()
                role = match[1].decode() if (match := _ROLE.search(command)) else ""
                if role in self._roles and self._mark in command + (folder / "environ").read_bytes():
                    found.append((int(folder.name), role))
        if sum(role == _NEEDED for _, role in found) == 1:
            found = [one for one in found if one[1] != _NEEDED]
        self._random.shuffle(found)
        return found
