"""Files and batches on the bus of `penstock up`, with its users and permissions, over a kill of everything at once."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from common.models.source import DEFAULT_MODEL, ModelFiles
from tests.e2e.test_up import ROOT, penstock_up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

FLAGS = ("--engine", "simulated", "--time-scale", "1", "--kvstore", "0", "--gateway", "2")
NUM_LINES = 400


def content() -> bytes:
    body = {"model": DEFAULT_MODEL, "prompt": "hi", "max_tokens": 200, "ignore_eos": True}
    lines = ({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(NUM_LINES))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_what_was_accepted_survives_kill_9_of_everything_at_once(tmp_path: Path, smollm2: ModelFiles) -> None:
    with penstock_up(tmp_path, *FLAGS) as (site, up):
        assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
        with httpx.Client(base_url=f"http://127.0.0.1:{site.http_port}/v1", timeout=30) as http:
            file = http.post("/files", files={"file": ("x.jsonl", content())}, data={"purpose": "batch"}).json()
            asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = http.post("/batches", json=asked).json()
            while batch["request_counts"]["completed"] < 20:
                assert batch["status"] in ("validating", "in_progress"), batch
                time.sleep(0.02)
                batch = http.get(f"/batches/{batch['id']}").json()
        second = [sys.executable, "-m", "common.cli", "up", "--http-port", "0", "--nats-port", "0"]
        second += ["--data-dir", str(tmp_path / "data"), *FLAGS]
        ended = subprocess.run(second, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 1 and "another `penstock up` keeps its files in" in ended.stderr
        up.kill()
        up.wait()
    with (
        penstock_up(tmp_path, *FLAGS) as (site, up),
        httpx.Client(base_url=f"http://127.0.0.1:{site.http_port}/v1", timeout=30) as http,
    ):
        while batch["status"] != "completed":
            assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
            time.sleep(0.1)
            batch = http.get(f"/batches/{batch['id']}").json()
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        results = http.get(f"/files/{batch['output_file_id']}/content").text.splitlines()
        assert sorted(json.loads(each)["custom_id"] for each in results) == sorted(map(str, range(NUM_LINES)))
        up.terminate()
        assert up.wait(60) == 0
