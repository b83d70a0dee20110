"""Where the `penstock` command begins: before what takes half a second to import, so that Ctrl-C is quiet from the start."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO


def main() -> None:
    """Run the command that `sys.argv` names; after Ctrl-C the status is 130."""
    try:
        sys.stdout, sys.stderr = _tolerant(sys.stdout), _tolerant(sys.stderr)
        from common.cli.app import run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)


def _tolerant(stream: TextIO | None) -> TextIO:
    """Return the stream with an error handler for what its encoding lacks, or for a closed one (`>&-`) one to nowhere."""
    if stream is None:
        return Path(os.devnull).open("w", encoding="utf-8", errors="replace")
    stream.reconfigure(errors="replace" if stream.isatty() else "backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    return stream
