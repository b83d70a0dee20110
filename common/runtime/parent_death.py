"""Children that end with their parent, however it ends: Linux tells a process when its parent dies.

`guard()` is called by a service at its start. For a program that isn't ours, run it through this module:
`python -m common.runtime.parent_death SIGKILL nats-server …` asks for the signal and becomes the program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "PENSTOCK_PARENT_PID"
"""A supervisor sets it to its own process id in its children's environment."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signal_number: signal.Signals) -> None:
    """Get `signal_number` when the parent ends; end now if it has ended already. Does nothing where Linux isn't."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)


def guard() -> None:
    """SIGHUP when the supervisor named by `PENSTOCK_PARENT_PID` dies: a service then cleans up and ends at once.

    What `nohup` started ignores that signal, and so do its children: not this one.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent.isdigit():
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        die_with_parent(int(parent), signal.SIGHUP)


def unguard() -> None:
    """Get no more such signals. A parent with threads is a chain of parents: as it dies, each of them sends one."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


if __name__ == "__main__":
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)), signal.Signals[sys.argv[1]])
    os.execv(sys.argv[2], sys.argv[2:])
