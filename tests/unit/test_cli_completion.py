"""Completion in a shell: settings of `penstock up`, names of models, and the scripts as shells run them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from common.cli.up_command import complete
from common.cli.up_settings import offered

ROOT = Path(__file__).parents[2]


def words(*typed: str) -> list[str]:
    """What the last word may become after the others, at `penstock up`."""
    return [candidate.value for candidate in complete(typed[:-1], typed[-1], offered().values())]


def test_every_setting_of_up_is_completed() -> None:
    flags = words("")
    assert set(flags) == {field.flag for field in offered().values()} | {"--config", "--help"}
    assert all(candidate.help for candidate in complete((), "", offered().values())), "each says what it is"
    assert words("--kv-") == [
        "--kv-index-blocks",
        "--kv-transfer",
        "--kv-cache-dtype",
        "--kv-cache-mb",
        "--kv-event-backlog",
        "--kv-stage-mb",
        "--kv-pin-kvstore",
        "--kv-disk",
        "--kv-disk-gb",
    ]
    assert words("--dtype", "float32", "--kv-cache-m") == ["--kv-cache-mb"]
    assert {"--no-strict", "--no-canary"} <= set(words("--no-")) and "--no-dtype" not in words("--no-")


def test_values_are_completed_where_they_are_known() -> None:
    assert words("--dtype", "f") == ["float32", "float16"]
    assert words("--dtype", "=", "f") == ["float32", "float16"], "as bash has --dtype=f"
    assert words("--strict", "=", "") == ["true", "false"]
    assert "--dtype" in words("--strict", ""), "a switch takes no value"
    assert words("--config", "") == words("--api-keys", "") == [], "the shell's own: files"
    assert words("--model", "smol") == ["smollm2-135m-instruct"]
    assert "dummy:tiny" in words("--model", "dum") and "dummy:tiny" not in words("--model", "")


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `penstock` is a program, with a Hugging Face cache of one model and half a model."""
    program = tmp_path / "bin" / "penstock"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m common.cli "$@"\n')
    program.chmod(0o755)
    hub = tmp_path / "hub"
    for name in ("models--Qwen--Qwen3-0.6B/snapshots/abc", "models--meta--Half/blobs"):
        (hub / name).mkdir(parents=True)
    (hub / "models--Qwen--Qwen3-0.6B/snapshots/abc/config.json").write_text("{}")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    path = f"{program.parent}:{os.environ['PATH']}"
    return clean | {"PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(hub), "PENSTOCK_NATS_URL": "nats://127.0.0.1:9"}


def in_bash(environment: dict[str, str], *typed: str) -> list[str]:
    """What bash offers, by the script that it is told to load."""
    array = " ".join(map(shlex.quote, typed))
    script = (
        'eval "$(_PENSTOCK_COMPLETE=source_bash penstock)"\n'
        f"COMP_WORDS=({array}); COMP_CWORD={len(typed) - 1}\n"
        "_penstock_completion penstock\nprintf '%s\\n' \"${COMPREPLY[@]}\""
    )
    ended = subprocess.run(["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert not ended.stderr
    return ended.stdout.split()


def test_bash_completes_commands_settings_and_models(shell: dict[str, str]) -> None:
    assert {"up", "chat", "generate", "bench"} <= set(in_bash(shell, "penstock", ""))
    assert in_bash(shell, "penstock", "up", "--kv-cache-d") == ["--kv-cache-dtype"]
    assert in_bash(shell, "penstock", "pull", "Q") == ["Qwen/Qwen3-0.6B"]
    assert in_bash(shell, "penstock", "up", "--model", "") == ["smollm2-135m-instruct", "Qwen/Qwen3-0.6B"]
    assert in_bash(shell, "penstock", "chat", "--model", "s") == ["smollm2-135m-instruct"], "no bus, and nothing said about it"


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_other_shells_get_descriptions_as_well(shell: dict[str, str], name: str) -> None:
    asked = {"_PENSTOCK_COMPLETE": f"complete_{name}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    asked["_TYPER_COMPLETE_ARGS"] = "penstock up --"
    ended = subprocess.run(["penstock"], env=shell | asked, capture_output=True, text=True, check=True)
    assert not ended.stderr
    for field in offered().values():
        assert field.flag in ended.stdout
    assert "memory for KV blocks, MiB" in ended.stdout


def test_where_no_shell_is_found_the_command_says_so_and_fails(shell: dict[str, str]) -> None:
    """As in a container, where the command is the first process: here its parent ends, and it is init's."""
    script = (
        "import os, subprocess, sys, time\n"
        "if os.fork():\n    os.wait(); os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork():\n    os._exit(0)\n"
        "time.sleep(0.2)\n"
        "ended = subprocess.run(['penstock', '--show-completion'], capture_output=True, text=True)\n"
        "print(ended.returncode, ended.stdout, ended.stderr)\n"
    )
    clean = {name: value for name, value in shell.items() if name != "SHELL"}
    said = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, text=True, check=True).stdout
    assert "Traceback" not in said and "Warning" not in said
    assert (said.startswith("1 ") and "not supported" in said) or (said.startswith("0 ") and "_penstock_completion" in said)
