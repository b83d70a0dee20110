"""`penstock up --lookup on` says what `--lookup off` says, greedy and sampled, alone and side by side; and guesses rightly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from openai import OpenAI

from bench.cpu.copying import PROMPTS
from common.models.source import ModelFiles
from common.protocol import messages, subjects
from common.protocol.messages import Presence
from common.runtime.bus import BusMessage
from common.runtime.nats_bus import connect
from tests.e2e.test_up import penstock_up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAMPLING: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.95, "seed": 5})
ASKED = [(prompt, sampling) for prompt in (*PROMPTS[2:9:2], "Why is the sky blue?") for sampling in SAMPLING]


async def drafted(nats_port: int) -> tuple[int, int]:
    """Tokens that the decode worker verified and accepted so far, by its next heartbeat but one."""
    heard: list[Presence] = []

    def hear(message: BusMessage) -> None:
        presence = messages.decode(message.data)
        if isinstance(presence, Presence) and presence.worker.role == "decode":
            heard.append(presence)

    bus = await connect(f"nats://127.0.0.1:{nats_port}", name="test")
    await bus.subscribe(subjects.any_presence(), hear)
    with anyio.fail_after(10):
        while len(heard) < 2:
            await anyio.sleep(0.05)
    await bus.close()
    return heard[-1].draft_tokens, heard[-1].accepted_tokens


def answers(folder: Path, *flags: str) -> tuple[list[str], tuple[int, int]]:
    """The text for each of `ASKED`, one after the other and then all at once; and what was verified and accepted."""
    folder.mkdir()
    with penstock_up(folder, "--draft", "0", *flags) as (site, _), httpx.Client(timeout=120) as http:

        def ask(asked: tuple[str, dict[str, Any]]) -> str:
            prompt, sampling = asked
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 120, **sampling}
            answer = http.post(f"http://127.0.0.1:{site.http_port}/v1/chat/completions", json=body).raise_for_status().json()
            return answer["choices"][0]["message"]["content"]

        found = [ask(each) for each in ASKED]
        with ThreadPoolExecutor(len(ASKED)) as clients:
            found += clients.map(ask, ASKED)
        return found, anyio.run(drafted, site.nats_port)


def test_lookup_changes_no_text_and_its_guesses_hold(tmp_path: Path, smollm2: ModelFiles) -> None:
    without, unverified = answers(tmp_path / "off", "--lookup", "off", "--head", "off")
    always, (proposed, accepted) = answers(tmp_path / "always", "--lookup", "on", "--head", "off", "--verify", "always")
    assert always == without
    assert unverified == (0, 0)
    assert proposed > accepted > 1000, "most of what is said the second time, of the copies the first time"
    measured, (verified, held) = answers(tmp_path / "measured")
    assert measured == without, "as `up` does by default"
    assert held > 0.5 * verified > 0


def test_what_a_client_predicts_is_taken_over_and_changes_no_text(tmp_path: Path, smollm2: ModelFiles) -> None:
    """With the answer itself as the prediction, with some words changed, and with something else, for OpenAI's client."""
    asked: Any = {"messages": [{"role": "user", "content": "Write a short story about a lighthouse."}], "max_tokens": 60}
    with (
        penstock_up(tmp_path, "--draft", "0", "--head", "off", "--zero-retention") as (site, _),
        OpenAI(base_url=f"http://127.0.0.1:{site.http_port}/v1", api_key="none", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        for sampling in SAMPLING:
            given: Any = {"model": smollm2.name, **asked, **sampling}
            text = create(**given).choices[0].message.content
            held: list[int] = []
            parts: list[tuple[int, int]] = []
            for predicted in ("Nothing of the kind.", text, text.replace("the", "a")):
                before = anyio.run(drafted, site.nats_port)[1]
                again = create(**given, prediction={"type": "content", "content": predicted})
                assert again.choices[0].message.content == text
                assert again.usage is not None
                told = again.usage.completion_tokens_details
                assert told is not None
                parts.append((told.accepted_prediction_tokens or 0, told.rejected_prediction_tokens or 0))
                held.append(anyio.run(drafted, site.nats_port)[1] - before)
            assert held[1] > 40 and held[1] > held[2] > held[0]
            assert [accepted > 40 for accepted, _ in parts] == [False, True, True]
            assert parts[0][1] >= 3 and parts[1][1] <= 1 < parts[2][1], "the answer, and one whose words are others"
