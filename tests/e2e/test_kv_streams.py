"""KV of a long prompt leaves while it is computed: real processes, a real nats-server, real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.cli.explain import ask
from tests.e2e.stack import ROOT, Stack
from tests.e2e.test_kv_seen import events, measured

REAL_ENGINE = ("--dtype", "float32", "--kv-cache-mb", "128", "--token-budget", "32")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_a_streamed_prompt_is_answered_as_one_that_stays_on_its_worker(nats_server: str, tmp_path: Path) -> None:
    words = (ROOT / "LICENSE").read_text().split()
    bodies: list[dict[str, Any]] = [
        {"prompt": " ".join(words[start : start + 100]), "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        for start in (100, 400)
    ]
    async with Stack(nats_server, tmp_path, engine_flags=REAL_ENGINE) as stack:
        await stack.start("gateway", "--direct-max-tokens", "-1")
        await stack.start("gateway", "--direct-max-tokens", "100000")
        await stack.start("prefill")
        await stack.start("decode")
        await stack.ready(within_s=180)
        for number, body in enumerate(bodies):
            before = await measured(stack, "decode-0")
            id = f"streamed-{number}"
            answer = await stack.client.post(
                f"{stack.url('gateway-0')}/v1/completions", json=body, headers={"x-request-id": id}
            )
            assert answer.status_code == 200, answer.text
            handed_off = answer.json()["choices"][0]["text"]
            after = await measured(stack, "decode-0")
            got = {name: after[(name,)] - before[(name,)] for name in ("kv_streamed_bytes_total", "kv_received_bytes_total")}
            assert 0 < got["kv_streamed_bytes_total"] <= got["kv_received_bytes_total"]
            (one,) = (await ask(stack.bus, id)).requests
            parts, (received,) = events(one, "prefill", "KV part"), events(one, "decode", "KV received")
            assert len(parts) == received.facts["streamed_parts"] and len(parts) >= 2
            assert received.facts["streamed_bytes"] == got["kv_streamed_bytes_total"]
            assert received.facts["recomputed_tokens"] == 0
            alone = await stack.complete(gateway="gateway-1", **body)
            assert alone.text == handed_off and handed_off
        await stack.clean(within_s=10)
