"""Lines that somebody types, with editing and history where Python has readline; or lines of what is piped in.

Must be used in the main thread: there Ctrl-C ends the waiting for a line.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Sequence

from common.cli.console import err
from common.protocol.errors import InvalidParameter

PROMPT = "> "

Complete = Callable[[str], Sequence[str]]
"""From what is typed so far to the whole lines that it may become."""


class PromptLine:
    """`interactive`: whether somebody sits at a terminal. What is typed is not written to any file."""

    def __init__(self, complete: Complete) -> None:
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        self._edited = self.interactive and sys.stdout.isatty() and _set_up_readline(complete)

    def read(self) -> str:
        """The next line.

        :raises EOFError: at the end, or after Ctrl-D. :raises KeyboardInterrupt: at Ctrl-C.
        :raises InvalidParameter: if it is no UTF-8 text.
        """
        if sys.stdin is None:
            raise EOFError
        try:
            if self._edited:
                line = input(PROMPT)
            else:
                if self.interactive:
                    err.print(PROMPT, end="")
                line = sys.stdin.readline()
                if not line:
                    raise EOFError
            line.encode()
        except UnicodeError as error:
            raise InvalidParameter("what was typed or piped in is not UTF-8 text", param="prompt") from error
        return line.removesuffix("\n")


def paths(begin: str) -> list[str]:
    """Files and folders whose paths begin so; folders with a slash."""
    home = os.path.expanduser("~")  # noqa: PTH111 — of a prefix, not of a path
    pattern = glob.escape(os.path.expanduser(begin)) + "*"  # noqa: PTH111
    found = [path + "/" if os.path.isdir(path) else path for path in sorted(glob.glob(pattern))]  # noqa: PTH112, PTH207
    return ["~" + path.removeprefix(home) for path in found] if begin.startswith("~/") else found


def _set_up_readline(complete: Complete) -> bool:
    """Editing and completion of whole lines; False where there is no readline."""
    try:
        import readline
    except ImportError:
        return False

    def candidate(text: str, number: int) -> str | None:
        found = complete(text)
        return found[number] if number < len(found) else None

    readline.set_completer_delims("")
    readline.set_completer(candidate)
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    return True
