"""Replicas claim different GPUs, and a dead one's GPU is free again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.protocol.errors import ConfigError
from common.runtime.gpu_claim import claim, count_gpus


def test_each_claim_takes_another_gpu_until_none_is_left(tmp_path: Path) -> None:
    held = [claim(tmp_path, 2), claim(tmp_path, 2)]
    assert [index for index, _ in held] == [0, 1]
    with pytest.raises(ConfigError, match="all 2 GPUs are claimed"):
        claim(tmp_path, 2)
    os.close(held[0][1])
    index, descriptor = claim(tmp_path, 2)
    assert index == 0
    os.close(descriptor)
    os.close(held[1][1])


def test_the_claim_lasts_over_exec_and_ends_with_the_process(tmp_path: Path) -> None:
    program = (
        "import sys, os, pathlib; from common.runtime.gpu_claim import claim; claim(pathlib.Path(sys.argv[1]), 1);"
        "os.execv('/bin/sh', ['/bin/sh', '-c', 'echo claimed; read wait'])"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin and holder.stdout
    assert holder.stdout.readline() == "claimed\n"
    with pytest.raises(ConfigError):
        claim(tmp_path, 1)
    holder.kill()
    holder.communicate()
    _, descriptor = claim(tmp_path, 1)
    os.close(descriptor)


def test_only_numbered_device_nodes_count(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 2


def test_a_machine_without_a_gpu_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="NVIDIA container toolkit"):
        claim(tmp_path, 0)


def test_a_service_that_needs_none_takes_none(tmp_path: Path) -> None:
    """Without a value of the variable the service runs where there is no GPU; with one it is told that there is none."""
    (tmp_path / "shown.py").write_text("import os, sys; print(sys.argv[1:], os.environ.get('PENSTOCK_DEVICE'))")
    command = [sys.executable, "-m", "common.runtime.gpu_claim", "--if", "PENSTOCK_DRAFT_MODEL", "shown", "--flag"]
    root = str(Path(__file__).parents[2])
    environment = {"PYTHONPATH": f"{root}:{tmp_path}", "PENSTOCK_SHM_DIR": str(tmp_path), "PENSTOCK_DRAFT_MODEL": ""}
    ended = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "['--flag'] None\n"), ended.stderr
    assert not list(tmp_path.glob("gpu-*.lock"))
    if count_gpus() == 0:
        ended = subprocess.run(
            command, env=environment | {"PENSTOCK_DRAFT_MODEL": "x"}, cwd=root, capture_output=True, text=True
        )
        assert ended.returncode != 0 and "no GPU is visible" in ended.stderr
