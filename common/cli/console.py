"""What every command shares: where it prints, the options many take, and how it runs async code.

Answers go to stdout, everything else to stderr, so that `penstock generate … > answer.txt` holds the answer alone.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

FILE_COLUMNS = 160
"""Width of tables that go to a file or a pipe."""


class MessageConsole(Console):
    """What goes to stderr. Where its reader has ended, a command goes on: `up` serves."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else FILE_COLUMNS)
err = MessageConsole(stderr=True, highlight=False, soft_wrap=True)

_CONTROLS = dict.fromkeys([*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)])
"""Everything that a terminal could obey but newline and tab."""

DEFAULT_NATS_URL = "nats://127.0.0.1:4222"

NatsUrl = Annotated[
    str,
    typer.Option(
        "--nats-url",
        metavar="URL",
        envvar="PENSTOCK_NATS_URL",
        help="The NATS server of the workers, or those of a cluster: a,b,c.",
    ),
]

Result = TypeVar("Result")


def run(function: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run async code to its end; an error raised inside task groups comes out by itself, not wrapped in groups."""
    for name in ("asyncio", "nats"):  # of TLS connections that end, and of what the bus denies: commands say what follows
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return anyio.run(function)
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def first_error(error: BaseException) -> BaseException:
    """The first error inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def write_answer(text: str) -> None:
    """A piece of a model's answer to stdout at once: exact into a file, without control characters on a terminal."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


@contextmanager
def download_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar of bytes; the body gets `report(done_bytes, total_bytes)`, total 0 while unknown."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(label, total=None)

        told = err.is_terminal

        def report(done_bytes: int, total_bytes: int) -> None:
            nonlocal told
            if not told:  # no bar into a file, but a line
                told = True
                err.print(label)
            bar.update(task, completed=done_bytes, total=total_bytes or None)

        yield report
