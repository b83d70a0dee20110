"""`python -m bench.crossing` as somebody runs it: whole and streamed answers of every kind, in several arrangements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_answers_are_the_same_in_pools_and_with_workers_that_die() -> None:
    command = [sys.executable, "-m", "bench.crossing", "--requests=60", "--only=one of each,disturbed"]
    done = subprocess.run(
        [*command, "--", "--engine=simulated"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert [row[1].strip() for row in rows] == ["alone", "one of each", "disturbed"]
    assert [[cell.strip() for cell in row[3:5]] for row in rows] == [["0", "0"]] * 3
    assert [int(row[2]) % 60 for row in rows] == [0, 0, 0] and int(rows[2][2]) > 60
    assert "stopped" in rows[2][6]
