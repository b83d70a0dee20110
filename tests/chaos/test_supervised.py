"""`penstock up` with an engine that a prompt crashes: workers come back under their ids, less and less often; others go on."""

from __future__ import annotations

import json
import re
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.models.source import ModelFiles
from tests.chaos.test_faults import POISON, POISONED, chaos
from tests.e2e.test_up import SIMULATED, penstock_up, run

pytestmark = pytest.mark.timeout(180)

NUM_POISONED = 2


@pytest.mark.slow
def test_workers_that_requests_crash_are_backed_off_and_stay_the_same_workers(tmp_path: Path, smollm2: ModelFiles) -> None:
    environment = SIMULATED | chaos(f"crash={POISON}")
    with penstock_up(tmp_path, "--decode", "2", "--kvstore", "0", environment=environment) as (site, _):
        status = [sys.executable, "-m", "common.cli", "status", "--json", "--nats-url", site.nats_url]

        def decoders() -> dict[str, Any]:
            workers = json.loads(run(status))
            return {worker["worker"]["id"]: worker for worker in workers if worker["worker"]["role"] == "decode"}

        before = decoders()
        with httpx.Client(base_url=f"http://127.0.0.1:{site.http_port}/v1", timeout=60) as http:
            model = http.get("/models").json()["data"][0]["id"]
            body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
            for _ in range(NUM_POISONED):
                refused = http.post("/completions", json=POISONED | {"model": model})
                assert refused.json()["error"]["code"] == "workers_died"
            assert http.post("/completions", json=body).status_code == 200
        ended = time.monotonic() + 60
        after = decoders()
        while [worker["state"] for worker in after.values()] != ["ready", "ready"]:
            assert time.monotonic() < ended, after
            after = decoders()
    assert set(after) == set(before), "a gateway remembers workers by id"
    said = (tmp_path / "up.log").read_text()
    total = 0
    for name in ("decode-0", "decode-1"):
        delays = [float(seconds or 0) for seconds in re.findall(rf"{name} ended .* again (?:at once|in ([\d.]+) s)", said)]
        assert all(later == max(0.5, 2 * earlier) for earlier, later in pairwise(delays)), said
        total += len(delays)
    assert 2 * NUM_POISONED <= total <= 3 * NUM_POISONED, said
