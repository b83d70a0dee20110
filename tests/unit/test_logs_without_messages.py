"""Logs of a process that may keep nothing: exceptions by type and place, without what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import logging, sys
from common.runtime import logs
logs.configure("debug", {format!r}, with_messages={with_messages})
def work(text):
    raise ValueError(f"can't read {{text}}")
for log in (logs.get("ours"), logging.getLogger("theirs")):
    try:
        try:
            work("kum" + "quat")
        except ValueError as error:
            raise KeyError("kum" + "quat") from error
    except KeyError as error:
        log.exception("it_failed")
        log.error("it_failed_again", exc_info=error)
"""


@pytest.mark.parametrize("format", ["console", "json"])
def test_an_exceptions_message_is_left_out_and_its_place_is_not(format: str) -> None:
    def said(*, with_messages: bool) -> str:
        program = PROGRAM.format(format=format, with_messages=with_messages)
        return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stderr

    quiet = said(with_messages=False)
    assert "kumquat" not in quiet and quiet.count("it_failed") == 4
    assert quiet.count("KeyError") == 4 and quiet.count("<string>:12") == 4
    assert "kumquat" in said(with_messages=True)
