"""Batches underneath the load, one after the other, as the operator: each line answered once, as it must be."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio
import httpx

from bench.mixed_load import answers
from bench.mixed_load.answers import PATHS, View, differences
from bench.mixed_load.asks import batch_line
from bench.mixed_load.tally import End, Tally
from bench.mixed_load.traffic import Known

POLL_S = 2.0
TRY_AGAIN_S = 1.0
LAST_S = 240.0
"""After the load's end, the last batch must be complete within this time."""
VIEWS: tuple[View, ...] = ("completions", "chat")
ENDED = ("completed", "failed", "expired", "cancelled")


class Batches:
    """Batches of `num_lines` lines for both models."""

    def __init__(self, url: str, key: str, known: Sequence[Known], tally: Tally, *, num_lines: int, seed: int) -> None:
        self._http = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30.0)
        self._known = known
        self._tally = tally
        self._num_lines = num_lines
        self._rng = random.Random(f"batches {seed}")

    async def run(self, end: End) -> None:
        """Submit the next one when one is complete, and see the last one through."""
        number = 0
        async with self._http:
            while not end.is_over:
                await self._batch(VIEWS[number % len(VIEWS)], end.until + LAST_S)
                number += 1

    async def _batch(self, view: View, deadline: float) -> None:
        known = [each for each in self._known if each.ask.view == view]
        chosen = [(self._rng.choice(known), self._rng.choice(("alpha", "beta"))) for _ in range(self._num_lines)]
        lines = [batch_line(each.ask, model, str(number)) for number, (each, model) in enumerate(chosen)]
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        form: dict[str, Any] = {"files": {"file": ("x.jsonl", content)}, "data": {"purpose": "batch"}}
        file = await self._call("POST", "/v1/files", **form)
        asked = {"input_file_id": file["id"], "endpoint": PATHS[view], "completion_window": "24h"}
        batch = await self._call("POST", "/v1/batches", json=asked)
        self._tally.batches["submitted"] += 1
        while batch["status"] not in ENDED:
            if time.monotonic() > deadline:
                self._tally.fault("batch not complete", json.dumps(batch["request_counts"]))
                return
            await anyio.sleep(POLL_S)
            batch = await self._call("GET", f"/v1/batches/{batch['id']}")
        if batch["status"] != "completed":
            self._tally.fault("batch not complete", json.dumps(batch))
            return
        self._tally.batches["completed"] += 1
        seen: Counter[str] = Counter()
        for name in ("output_file_id", "error_file_id"):
            for each in await self._lines(batch.get(name)):
                seen[each["custom_id"]] += 1
                self._check(view, each, *chosen[int(each["custom_id"])])
        if missing := len(chosen) - len(seen):
            self._tally.fault("batch lines missing", f"{missing} of {len(chosen)}")
        if twice := sum(count > 1 for count in seen.values()):
            self._tally.fault("batch lines twice", f"{twice} of {len(chosen)}")

    def _check(self, view: View, line: dict[str, Any], known: Known, model: str) -> None:
        response = line.get("response") or {}
        if response.get("status_code") != 200:
            self._tally.fault("batch line failed", json.dumps(line)[:300])
            return
        wrong = differences(known.answers[model], answers.whole(view, response["body"]), model=model)
        if wrong:
            self._tally.fault("wrong answer of a batch line", f"{known.ask.kind}, {model}: {'; '.join(wrong)}")
        self._tally.batches["lines"] += 1

    async def _lines(self, file: str | None) -> list[dict[str, Any]]:
        if not file:
            return []
        content = await self._call("GET", f"/v1/files/{file}/content", as_json=False)
        return [json.loads(line) for line in content.splitlines()]

    async def _call(self, method: str, path: str, *, as_json: bool = True, **more: Any) -> Any:
        """Send until it is answered: what is killed comes back."""
        while True:
            try:
                response = await self._http.request(method, path, **more)
                if response.status_code == 200:
                    return response.json() if as_json else response.text
                if response.status_code not in (429, 503):
                    self._tally.fault(f"batches: {response.status_code}", f"{method} {path}: {response.text[:300]}")
            except httpx.HTTPError:
                self._tally.batches["calls repeated"] += 1
            await anyio.sleep(TRY_AGAIN_S)
