"""Draft workers that propose garbage, die, stop or lose the bus change no token; all of it is `python -m bench.exactness`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.common.stack import ROOT
from bench.exactness.__main__ import ARRANGEMENTS, TASKS, TOPICS, prompts
from common.models.source import ModelFiles


def test_there_are_as_many_prompts_as_are_asked_for() -> None:
    assert len(set(prompts(500))) == len(TASKS) * len(TOPICS) == 500
    assert prompts(20) == prompts(500)[:20]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_garbage_and_lost_and_partitioned_draft_workers_change_no_token(smollm2: ModelFiles) -> None:
    names = ["garbage", "killed and stopped", "partitioned"]
    assert set(names) < set(ARRANGEMENTS)
    # behind a relay that is closed half of the time, few prompts may have no token verified, which is status 1
    command = [sys.executable, "-m", "bench.exactness", "--prompts=12", "--tokens=48", f"--only={','.join(names)}"]
    ended = subprocess.run([*command, f"--model={smollm2.path}"], cwd=ROOT, capture_output=True, text=True, timeout=480)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = [line for line in ended.stdout.splitlines() if line.startswith(tuple(f"| {name}" for name in names))]
    assert len(rows) == 3 and all(line.count("12 of 12") == 3 for line in rows)
