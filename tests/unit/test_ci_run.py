"""`.ci/run`, with a `make` that notes what it is asked for: what is run in which order, and when the clients are left out."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
MAKE = """#!/bin/sh
target=$2
echo "made $target"
case "$target" in
  "$HANGS") exec sleep 60 ;;
  "$FAILS") echo "ERROR: No matching distribution found for litellm"; exit 1 ;;
esac
"""


@pytest.fixture
def make(tmp_path: Path) -> Path:
    program = tmp_path / "make"
    program.write_text(MAKE)
    program.chmod(0o755)
    return tmp_path


def run(make: Path, inherited: tuple[int, ...] = (), /, **environment: str) -> tuple[int, list[str]]:
    variables = {"PATH": f"{make}:{os.environ['PATH']}", "FAILS": "nothing", "HANGS": "nothing", **environment}
    ended = subprocess.run(
        [str(SCRIPT)], env=variables, capture_output=True, text=True, timeout=30, check=False, pass_fds=inherited
    )
    return ended.returncode, ended.stdout.splitlines()


def test_the_clients_are_tested_before_the_tests(make: Path) -> None:
    assert run(make) == (0, ["made setup", "made lint", "made clients", "made test"])


def test_clients_that_cant_be_installed_are_left_out_with_one_line(make: Path) -> None:
    status, (*_, line, last) = run(make, FAILS="clients-setup")
    assert (status, last) == (0, "made test")
    assert line.startswith("the clients are left out") and line.endswith("ERROR: No matching distribution found for litellm")


def test_an_installation_that_hangs_is_one_that_failed(make: Path) -> None:
    status, (*_, line, last) = run(make, HANGS="clients-setup", CLIENTS_SETUP_S="0.2")
    assert (status, last) == (0, "made test")
    assert line.startswith("the clients are left out")


@pytest.mark.parametrize("environment", [{"FAILS": "clients"}, {"HANGS": "clients", "CLIENTS_S": "0.2"}])
def test_a_client_that_fails_or_hangs_fails_the_run(make: Path, environment: dict[str, str]) -> None:
    status, lines = run(make, **environment)
    assert status != 0 and "made test" not in lines


def test_a_rule_that_is_broken_fails_the_run_at_once_and_ends_the_installation(make: Path) -> None:
    reader, writer = os.pipe()  # closed when the last process that the run started has ended
    status, lines = run(make, (writer,), FAILS="lint", HANGS="clients-setup")
    os.close(writer)
    assert status != 0 and lines[:2] == ["made setup", "made lint"] and not {"made clients", "made test"} & set(lines)
    assert select.select([reader], [], [], 20)[0] and os.read(reader, 1) == b""
    os.close(reader)


def test_a_variable_leaves_the_clients_out(make: Path) -> None:
    assert run(make, CLIENTS="0") == (0, ["made setup", "made lint", "made test"])
