"""How a process of ours starts another one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

CODE = Path(__file__).parents[2]


def python_module(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of `python -m module`, with this interpreter.

    Python would look for modules in the working directory first, where a user may have a folder `services` or a file
    `torch.py`. It does not, unless that is where this code is.
    """
    try:
        safe = [] if Path.cwd() == CODE else ["-P"]
    except OSError:  # it was removed
        safe = ["-P"]
    return [sys.executable, *safe, "-m", module, *arguments]
